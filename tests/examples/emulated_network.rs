//! Machines joined by an emulated network, in which other programs run: `emulated_network CONFIG`, with the
//! network's configuration as JSON. Prints a line with their namespaces and addresses, carries packets until
//! its input ends, and then prints a line with the counts of packets.

use std::io::{self, Read};

use serde_json::json;
use shoal_tests::emulator::link::Config;
use shoal_tests::emulator::network::Machines;

fn main() -> Result<(), String> {
    let text = std::env::args().nth(1).ok_or("the configuration is missing: a network as JSON")?;
    let config: Config = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let mut machines = Machines::new(&config)?;
    let addresses: Vec<String> =
        (0..config.ends.len()).map(|end| Machines::address(end).to_string()).collect();
    println!("{}", json!({ "namespaces": machines.names(), "addresses": addresses }));
    io::stdin().read_to_end(&mut Vec::new()).map_err(|error| error.to_string())?;
    println!("{}", json!({ "counts": machines.stop() }));
    Ok(())
}
