//! Finds members whose processes have ended, for a coordinator without connections to them.
//!
//! A QUIC packet to a closed port gets no answer that a program sees, so a death looks like a slow
//! link. Discovery listens on TCP with the same port number, and there the system at the other end
//! refuses the connection at once.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use shoal_protocol::ids::Member;
use shoal_protocol::message::View;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Members that are probed at a time.
const AT_ONCE: usize = 64;

/// The longest wait for one address. A silent one is left to the QUIC connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns the members that refuse connections at every address.
pub(super) async fn gone(view: View, me: Member) -> Vec<Member> {
    let others = view.members.into_iter().filter(|record| record.member.peer != me.peer);
    let probes = stream::iter(others).map(|record| async move {
        let gone = refuses_everywhere(&record.addresses).await;
        gone.then_some(record.member)
    });
    probes.buffer_unordered(AT_ONCE).filter_map(|gone| async move { gone }).collect().await
}

async fn refuses_everywhere(addresses: &[SocketAddr]) -> bool {
    for address in addresses {
        let refused = match timeout(PATIENCE, TcpStream::connect(address)).await {
            Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
            Ok(Ok(_)) | Err(_) => false,
        };
        if !refused {
            return false;
        }
    }
    !addresses.is_empty()
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId, Stage, StageSpan};
    use shoal_protocol::message::MemberRecord;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn only_a_member_that_listens_nowhere_is_gone() {
        let here = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (open, shut) = (here.local_addr().expect("bound"), closed.local_addr().expect("bound"));
        drop(closed);
        let member = |number| Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) };
        let record = |number, addresses: &[SocketAddr]| MemberRecord {
            addresses: addresses.to_vec(),
            ..MemberRecord::plain(member(number), StageSpan::one(Stage(0)))
        };
        let members = [
            record(1, &[shut]),
            record(2, &[shut]),
            record(3, &[shut, open]),
            record(4, &[open]),
            record(5, &[]),
        ];
        let members = members.into_iter().map(Into::into).collect();
        assert_eq!(gone(View { number: 1, members }, member(1)).await, [member(2)]);
    }
}
