//! The handshake on a TCP connection before libp2p uses it. Noise proves the id of the other end,
//! and both ends present their credentials. A peer that is not admitted receives the reason and
//! nothing else.

use std::io;
use std::iter;
use std::pin::Pin;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use libp2p::core::upgrade::{InboundConnectionUpgrade, OutboundConnectionUpgrade, UpgradeInfo};
use libp2p::identity::Keypair;
use libp2p::noise;

use crate::ids::PeerId;
use crate::net::admission::{Denied, Gate, Pass, Reason, UnixTime};
use crate::net::identity::peer_of;
use crate::wire;

/// The name of the handshake, which keeps other libp2p programs out.
const PROTOCOL: &str = "/shoal/guarded-noise/1";

/// Maximum bytes of an end's credentials; a full access list fits.
const LARGEST: usize = 96 << 10;

/// The Noise handshake followed by the admission check.
#[derive(Clone)]
pub(super) struct Guard {
    noise: noise::Config,
    gate: Gate,
}

/// The reason why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum GuardError {
    /// The other end did not prove its id.
    #[error(transparent)]
    Noise(#[from] noise::Error),
    /// The other end has another kind of key.
    #[error("the other end's identity is not an ed25519 one")]
    Identity,
    /// The connection broke.
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] io::Error),
    /// The message of the other end is malformed.
    #[error("the other end's greeting is malformed")]
    Malformed,
    /// The other end does not admit this peer.
    #[error("not admitted: {0}")]
    Denied(Denied),
    /// This peer does not admit the other end.
    #[error("the other end does not prove that it takes part in the run: {0}")]
    Stranger(Denied),
}

/// The answer of the dialled end.
#[derive(bincode::Encode, bincode::Decode)]
enum Answer {
    Welcome(Pass),
    Denied(Denied),
}

impl Guard {
    pub(super) fn new(keypair: &Keypair, gate: Gate) -> Result<Self, noise::Error> {
        Ok(Self { noise: noise::Config::new(keypair)?, gate })
    }

    /// Checks the admission of the other end, and records a refusal.
    fn admit(&self, peer: PeerId, pass: &Pass) -> Result<(), Denied> {
        let decided = self.gate.admit(peer, pass, UnixTime::now());
        if let Err(denied) = &decided {
            self.gate.turned_away(denied.into(), Some(peer), None, denied.to_string());
        }
        decided
    }

    async fn answer<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        peer: PeerId,
        stream: &mut S,
    ) -> Result<(), GuardError> {
        let pass: Pass = read(stream).await.inspect_err(|error| {
            if matches!(error, GuardError::Malformed) {
                self.gate.turned_away(Reason::Malformed, Some(peer), None, error.to_string());
            }
        })?;
        match self.admit(peer, &pass) {
            Ok(()) => write(stream, &Answer::Welcome(self.gate.pass())).await,
            Err(denied) => {
                write(stream, &Answer::Denied(denied.clone())).await?;
                // An orderly close, so that the answer arrives.
                stream.close().await?;
                Err(GuardError::Stranger(denied))
            }
        }
    }

    async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        peer: PeerId,
        stream: &mut S,
    ) -> Result<(), GuardError> {
        write(stream, &self.gate.pass()).await?;
        match read(stream).await? {
            Answer::Welcome(pass) => self.admit(peer, &pass).map_err(GuardError::Stranger),
            Answer::Denied(denied) => Err(GuardError::Denied(denied)),
        }
    }
}

async fn write<S: AsyncWrite + Unpin>(
    stream: &mut S,
    message: &impl wire::Encode,
) -> Result<(), GuardError> {
    let body = wire::encode(message).expect("credentials are within the limit of a message");
    let length = u32::try_from(body.len()).expect("a message has a cap").to_le_bytes();
    stream.write_all(&[&length, &body[..]].concat()).await?;
    Ok(stream.flush().await?)
}

/// Reads a message; allocates nothing beyond the limit. libp2p's timeout of new connections
/// applies.
async fn read<S: AsyncRead + Unpin, T: bincode::Decode<()>>(
    stream: &mut S,
) -> Result<T, GuardError> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LARGEST {
        return Err(GuardError::Malformed);
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    wire::decode(&body).map_err(|_| GuardError::Malformed)
}

impl UpgradeInfo for Guard {
    type Info = &'static str;
    type InfoIter = iter::Once<Self::Info>;

    fn protocol_info(&self) -> Self::InfoIter {
        iter::once(PROTOCOL)
    }
}

type Guarded<T> = (libp2p::PeerId, noise::Output<T>);
type Upgrade<T> = Pin<Box<dyn Future<Output = Result<Guarded<T>, GuardError>> + Send>>;

impl<T> InboundConnectionUpgrade<T> for Guard
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Output = Guarded<T>;
    type Error = GuardError;
    type Future = Upgrade<T>;

    fn upgrade_inbound(self, socket: T, info: Self::Info) -> Self::Future {
        Box::pin(async move {
            let (peer, mut stream) = self.noise.clone().upgrade_inbound(socket, info).await?;
            let known = peer_of(&peer).ok_or(GuardError::Identity)?;
            self.answer(known, &mut stream).await?;
            Ok((peer, stream))
        })
    }
}

impl<T> OutboundConnectionUpgrade<T> for Guard
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Output = Guarded<T>;
    type Error = GuardError;
    type Future = Upgrade<T>;

    fn upgrade_outbound(self, socket: T, info: Self::Info) -> Self::Future {
        Box::pin(async move {
            let (peer, mut stream) = self.noise.clone().upgrade_outbound(socket, info).await?;
            let known = peer_of(&peer).ok_or(GuardError::Identity)?;
            self.ask(known, &mut stream).await?;
            Ok((peer, stream))
        })
    }
}
