//! Connections with TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use shoal_hub::{Hub, HubError, Repository};

use crate::repository::{COMMIT, config};

/// A server that answers two connections with the commit; returns its certificate in PEM.
fn start() -> (SocketAddr, String) {
    let CertifiedKey { cert, key_pair } =
        generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key_pair.serialize_der()));
    let settings = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .expect("settings");
    let settings = Arc::new(settings);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming().take(2) {
            let Ok(stream) = stream else { return };
            let connection = ServerConnection::new(Arc::clone(&settings)).expect("a connection");
            let mut tls = StreamOwned::new(connection, stream);
            // A client that does not trust the certificate breaks off.
            let _ = tls.read(&mut [0; 4096]);
            let body = format!("{{\"sha\":\"{COMMIT}\"}}");
            let length = body.len();
            let _ = write!(tls, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
            let _ = tls.flush();
        }
    });
    let body = BASE64.encode(cert.der());
    (address, format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"))
}

fn resolve(address: SocketAddr, authorities: Option<&Path>) -> Result<String, HubError> {
    let endpoint = format!("https://localhost:{}", address.port());
    let mut settings = config(&endpoint, Path::new("/no/such/cache"));
    settings.certificates = authorities.map(Path::to_owned);
    let repository: Repository = "owner/name".parse().expect("a repository");
    Hub::new(settings)?.resolve(&repository, "main")
}

#[test]
fn only_trusted_certificates_are_accepted() {
    let (address, pem) = start();
    let error = resolve(address, None).expect_err("not trusted");
    assert!(matches!(error, HubError::Untrusted { .. }), "{error:?}");
    assert!(error.to_string().contains("set SSL_CERT_FILE"), "{error}");
    let folder = tempfile::tempdir().expect("a folder");
    let authorities = folder.path().join("ca.pem");
    std::fs::write(&authorities, pem).expect("written");
    assert_eq!(resolve(address, Some(&authorities)).expect("trusted"), COMMIT);
}
