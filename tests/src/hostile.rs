//! A client that speaks the protocol with a fresh key and lies: what a stranger in an open run can do.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::packing::Packing;
use shoal_protocol::frame::{Element, Frame};
use shoal_protocol::ids::{
    Attempt, ClaimKey, ContentHash, Era, Exchange, Grant, Incarnation, Member, Mend, Microbatch,
    PeerId, Stage, StageSpan, Step, Term, WeightGroup,
};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{
    AnchorGroup, Envelope, FromCoordinator, Message, PassTimes, PeerMessage, Recalled, RoundId,
    RoundOutcome, SnapshotPart, StoredFile, StoredStage, TensorTag, TermProof, TermVote,
    ToCoordinator, View, ViewChange,
};
use shoal_protocol::net::Identity;
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::discovery::PeerAddress;
use shoal_protocol::net::transport::{
    Class, Congestion, NoFiles, Transport, TransportConfig, TransportEvent,
};
use shoal_protocol::units::Bytes;
use shoal_protocol::wire;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Long enough for a peer to answer or to hang up.
const ANSWER: Duration = Duration::from_millis(300);

/// A connection of a stranger to a peer.
pub struct Stranger {
    transport: Transport,
    events: mpsc::Receiver<TransportEvent>,
    me: Member,
    target: Member,
    manifest: Manifest,
}

impl Stranger {
    /// Connects with a fresh key.
    ///
    /// # Panics
    /// When the peer does not answer.
    pub async fn connect(address: &str) -> Self {
        let address: PeerAddress = address.parse().expect("the address of a peer");
        let identity = Identity::ephemeral();
        let config = TransportConfig {
            incarnation: Incarnation(1),
            run: None,
            congestion: Congestion::Cubic,
            files: Arc::new(NoFiles),
            gate: Gate::default(),
        };
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (transport, events) = Transport::bind(&identity, &[listen], config).expect("a port");
        let addresses = address.resolve().await.expect("it has an address");
        let welcome = transport.connect(address.peer, &addresses).await.expect("it is open to all");
        let manifest = &welcome.run.expect("it has a run").manifest;
        let manifest = Manifest::from_bytes(manifest).expect("its manifest");
        let me = Member { peer: identity.peer_id(), incarnation: Incarnation(1) };
        let target = Member { peer: address.peer, incarnation: welcome.incarnation };
        Self { transport, events, me, target, manifest }
    }

    /// Sends a message, if the peer has not hung up.
    fn send(&self, (era, term): (Era, Term), message: Message) {
        let (from, to) = (self.me.incarnation, self.target.incarnation);
        let bytes = wire::encode(&Envelope { from, to, era, term, message }).expect("small");
        let _ = self.transport.send_control(self.target.peer, bytes);
    }

    /// Waits until the peer is quiet or hangs up. Returns whether it hung up.
    pub async fn settle(&mut self) -> bool {
        while let Ok(event) = timeout(ANSWER, self.events.recv()).await {
            if matches!(event, None | Some(TransportEvent::Disconnected { .. })) {
                return true;
            }
        }
        false
    }

    /// Ends the connection.
    pub async fn leave(self) {
        self.transport.close().await;
    }

    /// Says that it is the coordinator, and then everything that a coordinator says.
    pub fn usurp(&self, victims: &[SocketAddr]) {
        let first = (Era(0), Term(0));
        let moved = |coordinator, addresses: Vec<SocketAddr>| Message::CoordinatorMoved {
            coordinator,
            addresses,
            proofs: vec![self.own_term()],
        };
        self.send(first, moved(self.me, Vec::new()));
        let nobody = Member { peer: Identity::ephemeral().peer_id(), ..self.me };
        self.send(first, moved(nobody, victims.to_vec()));
        self.send(first, Message::Elected { proofs: vec![self.own_term()] });
        for message in self.orders() {
            self.send((Era(1 << 20), Term(1 << 40)), Message::FromCoordinator(message));
        }
    }

    /// The term of its orders, signed by itself as the only anchor.
    fn own_term(&self) -> TermProof {
        let (peer, keys) = (self.me.peer, self.transport.keys());
        let group = AnchorGroup { history: 0, number: 1 << 40, voters: vec![[peer].into()] };
        let vote = TermVote { term: Term(1 << 40), coordinator: peer, group };
        let signature = keys.sign(&vote.signed_bytes(self.manifest.run_id()));
        TermProof { vote, signatures: [(peer, signature)].into() }
    }

    fn orders(&self) -> Vec<FromCoordinator> {
        let reason = "\u{1b}[2Ja stranger wrote this".to_owned();
        let span = StageSpan::one(Stage(0));
        let file = StoredFile {
            name: "../../x".to_owned(),
            hash: ContentHash([9; 32]),
            size: Bytes(1 << 30),
        };
        let stored = StoredStage { holders: vec![self.me.peer], files: vec![file] };
        let key = self.key(1, Stage(0), 0);
        let grant = Grant { term: Term(1 << 40), number: 1 };
        vec![
            FromCoordinator::Census {
                term: Term(1 << 40),
                era: Era(1 << 20),
                began_at: Step(0),
                span,
                commit: None,
                view: 0,
            },
            FromCoordinator::TakenOver,
            FromCoordinator::Rewind { era: Era(1 << 20), version: Step(0), span },
            FromCoordinator::Keep {
                version: Step(7),
                part: SnapshotPart { stage: Stage(0), stored },
            },
            FromCoordinator::View(ViewChange { since: 1, number: 99, ..ViewChange::default() }),
            FromCoordinator::Members { number: 99, part: (0, 1), members: View::default().members },
            FromCoordinator::Reclaim { key, grant, patience: PassTimes::default() },
            FromCoordinator::Expelled { reason: reason.clone() },
            FromCoordinator::Refused { reason: reason.clone() },
            FromCoordinator::Stopped { reason },
            FromCoordinator::Finished,
        ]
    }

    fn key(&self, step: u64, stage: Stage, microbatch: u32) -> ClaimKey {
        ClaimKey { step: Step(step), stage, microbatch: Microbatch(microbatch) }
    }

    /// All work of some steps.
    fn keys(&self, steps: std::ops::Range<u64>) -> Vec<ClaimKey> {
        let microbatches = 0..self.manifest.training.microbatches;
        let of_step = |step| {
            let microbatches = microbatches.clone();
            let stages = self.manifest.stages();
            stages.flat_map(move |stage| {
                microbatches.clone().map(move |number| (step, stage, number))
            })
        };
        let all = steps.flat_map(of_step);
        all.map(|(step, stage, number)| self.key(step, stage, number)).collect()
    }

    /// Offers work, accepts all and answers all of these steps, and reports it to the coordinator as a member does.
    pub fn meddle(&self, steps: std::ops::Range<u64>) {
        let stamp = (Era(0), Term(1));
        let said = |message| self.send(stamp, Message::PeerMessage(message));
        let reported = |message| self.send(stamp, Message::ToCoordinator(message));
        for key in self.keys(steps) {
            let (service_time, wanted) = (1, Exchange(0));
            said(PeerMessage::Offer { key, size: Bytes(64), retry: true });
            said(PeerMessage::Accepted { key, wanted, service_time });
            said(PeerMessage::Busy { key, service_time });
            said(PeerMessage::HeldBy { key, holder: self.me });
            said(PeerMessage::Evaluated { key });
            said(PeerMessage::Withdrawn { key });
            said(PeerMessage::Recall { key, input: Recalled::Gradient });
            let grant = Grant { term: Term(1), number: 1 };
            reported(ToCoordinator::Claim { key });
            let pass_times = PassTimes::default();
            reported(ToCoordinator::Done {
                key,
                grant,
                loss: None,
                pass_times,
                handover: Box::default(),
            });
            reported(ToCoordinator::Released { key, grant });
            reported(ToCoordinator::Diverged { key, reason: "a stranger says so".to_owned() });
            let round = self.round(key.step, WeightGroup(key.stage.0));
            let outcome = RoundOutcome { hash: ContentHash([0; 32]), square_norm: 0.0, proof: 0 };
            let (mend, checks, rates) = (Mend(0), Vec::new(), Vec::new());
            reported(ToCoordinator::Reduced {
                round,
                mend,
                outcome,
                checks,
                sums: Vec::new(),
                rates,
            });
            reported(ToCoordinator::RoundRefused { round, owner: None, reason: String::new() });
        }
        reported(ToCoordinator::CannotReach { member: self.target });
        reported(ToCoordinator::Leave);
    }

    fn round(&self, step: Step, weights: WeightGroup) -> RoundId {
        RoundId { era: Era(0), term: Term(1), step, weights, attempt: Attempt(0) }
    }

    /// Sends activations, gradients and pieces of rounds that nobody asked it for.
    pub async fn flood(&self, steps: std::ops::Range<u64>, value: f32) {
        let boundary = self.manifest.boundary_shape();
        let tensor = frame(Element::F32, &boundary, &value.to_le_bytes());
        let labels = frame(Element::U32, &self.manifest.label_shape(), &[1, 0, 0, 0]);
        for key in self.keys(steps) {
            let exchange = Exchange(0);
            self.tensor(
                TensorTag::Activation { key, exchange },
                vec![tensor.clone(), labels.clone()],
            )
            .await;
            self.tensor(TensorTag::ActivationGradient { key, exchange }, vec![tensor.clone()])
                .await;
            let round = self.round(key.step, WeightGroup(key.stage.0));
            let piece = key.microbatch.0;
            let (mend, proof) = (Mend(0), 0);
            let part = frame(Element::I64, &[64], &[1, 0, 0, 0, 0, 0, 0, 0]);
            self.tensor(TensorTag::RoundPart { round, mend, piece, proof }, vec![part]).await;
            let result = frame(Element::F32, &[64], &value.to_le_bytes());
            self.tensor(TensorTag::RoundResult { round, mend, piece, proof }, vec![result]).await;
        }
    }

    async fn tensor(&self, tag: TensorTag, frames: Vec<Frame>) {
        let tag = wire::encode(&tag).expect("small");
        let target: PeerId = self.target.peer;
        if let Ok(queued) = self.transport.send_tensor(target, tag, frames, Class::Gradient) {
            // A peer that hung up receives nothing more.
            let _ = timeout(ANSWER, queued).await;
        }
    }
}

/// A tensor that repeats one element.
fn frame(element: Element, shape: &[u32], one: &[u8]) -> Frame {
    let elements: usize = shape.iter().map(|size| *size as usize).product();
    let bytes = one.repeat(elements);
    Frame::pack(element, shape, bytes.into(), Packing::Raw).expect("shape and bytes agree")
}
