//! TLS whose certificates prove peer ids.
//!
//! Each process signs a temporary certificate with its identity, as specified by libp2p's TLS
//! handshake, and each end requires the other's certificate. The cipher order differs from
//! libp2p's: AES in hardware is faster than the ChaCha20 that libp2p prefers.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use libp2p_tls::certificate;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, NoKeyLog, SignatureScheme,
};

use super::error::TransportError;
use crate::ids::PeerId;
use crate::net::identity::{Identity, peer_of};

/// The name of the handshake. It does not contain the protocol version, so that builds of different
/// versions can still report the difference.
const ALPN: &[u8] = b"shoal/1";

/// The certificate of this process, and the cryptographic provider.
pub(super) struct Tls {
    provider: Arc<CryptoProvider>,
    certificate: Arc<CertifiedKey>,
}

/// The beginning of the validity of peers' certificates, 1975: libp2p's TLS handshake fixes it, in seconds since 1970.
const VALID_FROM: u64 = 157_766_400;

/// Refuses a clock that makes every certificate invalid, as on a machine without a battery for its clock.
///
/// # Errors
/// If the clock is before the validity of certificates.
fn check_clock(now: UnixTime) -> Result<(), TransportError> {
    let seconds = now.as_secs();
    if seconds < VALID_FROM { Err(TransportError::Clock { seconds }) } else { Ok(()) }
}

impl Tls {
    pub(super) fn new(identity: &Identity) -> Result<Self, TransportError> {
        check_clock(UnixTime::now())?;
        let failed = |error: &dyn std::fmt::Display| TransportError::Certificate {
            reason: error.to_string(),
        };
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites = vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ];
        let (certificate, key) =
            certificate::generate(identity.keypair()).map_err(|error| failed(&error))?;
        let key = aws_lc_rs::sign::any_ecdsa_type(&key).map_err(|error| failed(&error))?;
        let certificate = Arc::new(CertifiedKey::new(vec![certificate], key));
        Ok(Self { provider: Arc::new(provider), certificate })
    }

    /// Random secret bytes; `None` if the system has no entropy.
    pub(super) fn random<const N: usize>(&self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.provider.secure_random.fill(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The configuration of the accepting end; any peer may connect.
    pub(super) fn server(&self) -> Arc<QuicServerConfig> {
        let mut config = rustls::ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the suites are of TLS 1.3")
            .with_client_cert_verifier(Arc::new(Verifier::default()))
            // `with_single_cert` would refuse libp2p's critical extension.
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(self.certificate.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.key_log = Arc::new(NoKeyLog);
        // Each dial is a full handshake, so resumption tickets are not used.
        config.send_tls13_tickets = 0;
        Arc::new(QuicServerConfig::try_from(config).expect("AES-128-GCM is among the suites"))
    }

    /// The configuration of one dial of one peer. The verifier records a different peer that
    /// answered.
    pub(super) fn client(&self, expected: PeerId) -> (Arc<QuicClientConfig>, Arc<Verifier>) {
        let verifier = Arc::new(Verifier { expected: Some(expected), found: OnceLock::new() });
        let mut config = rustls::ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the suites are of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(verifier.clone())
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(self.certificate.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.key_log = Arc::new(NoKeyLog);
        config.resumption = Resumption::disabled();
        let config = QuicClientConfig::try_from(config).expect("AES-128-GCM is among the suites");
        (Arc::new(config), verifier)
    }
}

/// The peer at the other end of a connection; `None` for a key that is not ed25519.
pub(super) fn peer_behind(identity: Option<Box<dyn Any>>) -> Option<PeerId> {
    let chain = identity?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    identify(chain.first()?, &chain[1..]).ok()
}

fn identify(
    certificate: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<PeerId, Error> {
    if !intermediates.is_empty() {
        return Err(Error::General("a peer shows exactly one certificate".to_owned()));
    }
    let certificate = certificate::parse(certificate)?;
    peer_of(&certificate.peer_id())
        .ok_or_else(|| Error::General("a peer's key is an ed25519 key".to_owned()))
}

/// Accepts certificates that prove a peer id: any, or an expected one.
#[derive(Debug, Default)]
pub(super) struct Verifier {
    expected: Option<PeerId>,
    found: OnceLock<PeerId>,
}

impl Verifier {
    /// The peer that answered, if it is not the expected one.
    pub(super) fn stranger(&self) -> Option<PeerId> {
        self.found.get().copied().filter(|found| Some(*found) != self.expected)
    }

    fn verify(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), Error> {
        let peer = identify(certificate, intermediates)?;
        if self.expected.is_some_and(|expected| expected != peer) {
            // A handshake calls this once.
            let _ = self.found.set(peer);
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(())
    }
}

fn verify_signature(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    certificate::parse(certificate)?.verify_signature(
        signed.scheme,
        message,
        signed.signature(),
    )?;
    Ok(HandshakeSignatureValid::assertion())
}

fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("only TLS 1.3 is supported".to_owned()))
}

/// The signature scheme of the certificates.
fn schemes() -> Vec<SignatureScheme> {
    vec![SignatureScheme::ECDSA_NISTP256_SHA256]
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_before_all_certificates_is_named() {
        let at = |seconds| check_clock(UnixTime::since_unix_epoch(Duration::from_secs(seconds)));
        let error = at(86_400).expect_err("1970");
        assert!(error.to_string().contains("timedatectl"), "{error}");
        assert!(at(VALID_FROM - 1).is_err() && at(VALID_FROM).is_ok());
    }
}
