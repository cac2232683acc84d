//! The proxy that the environment names.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;

use shoal_hub::{Hub, HubConfig, Repository};

/// Set in the process that runs with a proxy.
const THROUGH_PROXY: &str = "SHOAL_HUB_TEST_THROUGH_PROXY";

/// Runs in a process of its own, whose environment names the proxy.
#[test]
fn client_with_a_proxy() {
    if std::env::var_os(THROUGH_PROXY).is_none() {
        return;
    }
    let mut settings = HubConfig::from_environment().expect("settings");
    settings.retry.attempts = 1;
    let repository: Repository = "owner/name".parse().expect("a repository");
    let failed = Hub::new(settings).expect("a client").resolve(&repository, "main");
    let error = failed.expect_err("the proxy refuses").to_string();
    assert!(error.contains("cannot be reached") && error.contains("proxy"), "{error}");
}

#[test]
fn connections_go_through_the_proxy_of_the_environment() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("an address");
    let proxy = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut lines = BufReader::new(stream.try_clone().expect("a copy")).lines();
        let first = lines.next().expect("a request").expect("a line");
        for line in lines.map_while(Result::ok) {
            if line.is_empty() {
                break;
            }
        }
        stream.write_all(b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n").expect("sent");
        first
    });
    let home = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    for name in ["ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "HF_HUB_OFFLINE", "HF_TOKEN"] {
        command.env_remove(name);
    }
    let output = command
        .args(["--exact", "proxy::client_with_a_proxy"])
        .env(THROUGH_PROXY, "1")
        .env("HF_HOME", home.path())
        .env("HF_ENDPOINT", "https://hub.invalid")
        .env("HTTPS_PROXY", format!("http://{address}"))
        .stderr(Stdio::null())
        .output()
        .expect("a process");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let first = proxy.join().expect("a request");
    assert!(first.starts_with("CONNECT hub.invalid:443 "), "{first}");
}
