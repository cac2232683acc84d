#![no_main]

shoal_fuzz::target!("relay_datagram");
