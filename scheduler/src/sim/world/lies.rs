//! A liar: a member that says anything of the protocol to anyone. One that hosts stages computes as it should, since
//! wrong work is another matter, and says what it likes about it.
//!
//! It otherwise does what a member does, so that it stays one as long as its lies do no harm. What it says concerns
//! the work under way, since other messages are late or early to anyone.

use shoal_protocol::ids::{
    Attempt, ClaimKey, ContentHash, Era, Exchange, Grant, Member, Mend, Microbatch, Stage,
    StageSpan, Step, Term, WeightGroup,
};
use shoal_protocol::message::{
    AnchorGroup, Followed, FromCoordinator, Handover, HeldClaim, PassTimes, PeerMessage, Recalled,
    RoundId, RoundOutcome, StoredFile, TensorTag, TermProof, TermVote, ToCoordinator, ViewChange,
};
use shoal_protocol::units::Bytes;

use super::event::Cargo;
use super::swarm::Swarm;
use crate::rng::Rng;
use crate::sim::hash_keys::HashKeys;
use crate::sim::marks::Mark;
use crate::sim::omitted_rules::Omit;
use crate::sim::payloads::Content;

impl Swarm<'_> {
    /// The liar says something.
    pub(super) fn lie(&mut self, number: u64) {
        let mut rng = Rng::new(self.scenario.seed ^ number.rotate_left(32) ^ 0x6c69_6172);
        let Some(liar) = self.scenario.liar else { return };
        let alive =
            (0..self.nodes.len()).filter(|index| *index != liar && self.nodes[*index].alive);
        let alive: Vec<usize> = alive.collect();
        if !self.nodes[liar].alive || alive.is_empty() {
            return;
        }
        let victim = rng.pick(&alive);
        let mut to = self.nodes[victim].me;
        let from = self.nodes[liar].me;
        let about = self.about(&mut rng, victim, from);
        let hosts = self.nodes[liar].span.is_some();
        let cargo = match rng.within(0..=9) {
            0 if rng.chance(500) => Cargo::CoordinatorMoved(from),
            0 => Cargo::Elected(vec![self.false_proof(&mut rng, from, about.grant.term)]),
            1 | 2 => Cargo::FromCoordinator(order(&mut rng, about)),
            3 | 4 => Cargo::PeerMessage(said(&mut rng, about)),
            5 | 6 if !hosts => self.tensor(&mut rng, about),
            _ => {
                to = self.leader().unwrap_or(to);
                Cargo::ToCoordinator(reported(&mut rng, about))
            }
        };
        let about_work = matches!(cargo, Cargo::PeerMessage(_) | Cargo::Tensor { .. });
        // Without that rule a liar says it in another's name.
        let from = match about_work && self.deviations.omits(Omit::Senders) {
            true => self.nodes[rng.pick(&alive)].me,
            false => from,
        };
        let (mut era, mut term) = self.nodes[victim].era_and_term(&cargo);
        if matches!(cargo, Cargo::FromCoordinator(_)) {
            term = Term(term.0 + rng.within(0..=1));
            era = Era(era.0 + rng.within(0..=1) as u32);
        }
        self.observation.mark(Mark::Lied);
        self.traffic.send(from, to, (era, term), cargo, &mut self.queue);
    }

    /// A proof that the liar was elected for the next term: by itself alone, or by the anchors, without their keys.
    fn false_proof(&self, rng: &mut Rng, liar: Member, term: Term) -> TermProof {
        let alone = rng.chance(500);
        let anchors = if alone { [liar.peer].into() } else { self.log.voters().clone() };
        let group =
            AnchorGroup { history: 0, number: rng.within(0..=9), voters: vec![anchors.clone()] };
        let vote = TermVote { term: term.next(), coordinator: liar.peer, group };
        let signature = HashKeys::sign_as(liar.peer, &vote.signed_bytes(self.log.run()));
        TermProof { vote, signatures: anchors.into_iter().map(|peer| (peer, signature)).collect() }
    }

    /// What a lie is about: work near that of the victim, and any members.
    fn about(&self, rng: &mut Rng, victim: usize, liar: Member) -> About {
        let training = &self.scenario.manifest.training;
        let step = self.nodes[victim].peer.version().0 + rng.pick(&[0, 0, 0, 1, 2]);
        let stage = Stage(rng.within(0..=u64::from(training.stages) - 1) as u16);
        let microbatch = Microbatch(rng.within(0..=u64::from(training.microbatches) - 1) as u32);
        let mut key = ClaimKey { step: Step(step), stage, microbatch };
        let groups = self.scenario.manifest.weight_groups().count() as u64;
        let (era, term) =
            self.nodes[victim].era_and_term(&Cargo::CoordinatorMoved(self.nodes[victim].me));
        let weights = WeightGroup(rng.within(0..=groups - 1) as u16);
        let round = RoundId { era, term, step: key.step, weights, attempt: Attempt(0) };
        let members: Vec<Member> = self.nodes.iter().map(|node| node.me).collect();
        let mut grant = Grant { term, number: rng.within(0..=100) };
        // Of work that it holds it may say more.
        let held = self.deviations.rules.grants_of(liar);
        if !held.is_empty() && rng.chance(500) {
            (key, grant) = rng.pick(&held);
        }
        About { key, round, grant, other: rng.pick(&members) }
    }

    /// A tensor of the right size with a content that nobody computed.
    fn tensor(&self, rng: &mut Rng, about: About) -> Cargo {
        let About { key, round, .. } = about;
        let (exchange, mend) = (Exchange(rng.within(0..=1) as u32), Mend(0));
        let piece = rng.within(0..=3) as u32;
        let proof = self.scenario.manifest.whole_proof(round.step, round.weights);
        let word = Content::Word(rng.number());
        let sums = Content::Sums(vec![1; rng.within(1..=4) as usize]);
        let manifest = &self.scenario.manifest;
        let (tag, content, size) = match rng.within(0..=3) {
            0 => (TensorTag::Activation { key, exchange }, word, manifest.activation_bytes()),
            1 => {
                let size = manifest.activation_bytes();
                (TensorTag::ActivationGradient { key, exchange }, word, size)
            }
            2 => (TensorTag::RoundPart { round, mend, piece, proof }, sums, Bytes(32)),
            _ => (TensorTag::RoundResult { round, mend, piece, proof }, sums, Bytes(16)),
        };
        Cargo::Tensor { tag, seal: None, content, size }
    }
}

/// What a lie is about.
#[derive(Debug, Clone, Copy)]
struct About {
    key: ClaimKey,
    round: RoundId,
    grant: Grant,
    other: Member,
}

fn order(rng: &mut Rng, About { key, grant, .. }: About) -> FromCoordinator {
    let reason = "a lie".to_owned();
    let span = StageSpan::one(key.stage);
    let version = key.step;
    match rng.within(0..=11) {
        0 => FromCoordinator::Stopped { reason },
        1 => FromCoordinator::Finished,
        2 => FromCoordinator::Expelled { reason },
        3 => FromCoordinator::Refused { reason },
        4 => FromCoordinator::Rewind { era: Era(rng.within(0..=9) as u32), version, span },
        5 => FromCoordinator::TakenOver,
        6 => FromCoordinator::View(ViewChange { number: 1 << 40, ..ViewChange::default() }),
        7 => FromCoordinator::Work { step: key.step, grants: vec![(key.microbatch, grant)] },
        8 => FromCoordinator::Granted { key, grant, next_holder: None },
        9 => FromCoordinator::Reclaim { key, grant, patience: PassTimes::default() },
        10 => FromCoordinator::Store { version, stage: key.stage },
        _ => FromCoordinator::Noted { key, grant },
    }
}

fn said(rng: &mut Rng, About { key, other, .. }: About) -> PeerMessage {
    let (wanted, service_time) = (Exchange(0), rng.within(0..=1_000));
    match rng.within(0..=7) {
        0 => PeerMessage::Offer { key, size: Bytes(8), retry: rng.chance(500) },
        1 => PeerMessage::Accepted { key, wanted, service_time },
        2 => PeerMessage::Busy { key, service_time },
        3 => PeerMessage::HeldBy { key, holder: other },
        4 => PeerMessage::Free { stage: key.stage },
        5 => PeerMessage::Withdrawn { key },
        6 => PeerMessage::Recall { key, input: Recalled::Activation },
        _ => PeerMessage::Evaluated { key },
    }
}

fn reported(rng: &mut Rng, About { key, round, grant, other }: About) -> ToCoordinator {
    let outcome = RoundOutcome { hash: ContentHash([7; 32]), square_norm: 1.0, proof: 1 };
    let reason = "a lie".to_owned();
    let (version, stage, mend) = (key.step, key.stage, Mend(0));
    match rng.within(0..=15) {
        0 => ToCoordinator::Claim { key },
        1 => ToCoordinator::Done {
            key,
            grant,
            loss: None,
            pass_times: PassTimes::default(),
            handover: Box::default(),
        },
        2 => ToCoordinator::Working { key, grant },
        3 => ToCoordinator::Released { key, grant },
        4 => {
            let (checks, sums, rates) = <_>::default();
            ToCoordinator::Reduced { round, mend, outcome, checks, sums, rates }
        }
        5 => {
            let owner = rng.chance(500).then_some(other);
            ToCoordinator::RoundRefused { round, owner, reason }
        }
        6 => ToCoordinator::Diverged { key, reason },
        7 => {
            let hash = ContentHash([9; 32]);
            let files = vec![StoredFile { name: "lie".to_owned(), hash, size: Bytes(1) }];
            ToCoordinator::Stored { version, stage, files }
        }
        8 => ToCoordinator::Kept { version, stage, whole: rng.chance(500) },
        9 => ToCoordinator::Archived { version },
        10 => ToCoordinator::Ready { version, view: rng.within(0..=9) },
        11 => ToCoordinator::Behind(match rng.chance(500) {
            true => Followed::Destination,
            false => Followed::Own,
        }),
        12 => ToCoordinator::CannotReach { member: other },
        13 => {
            let claim = HeldClaim {
                key,
                grant,
                done: rng.chance(500),
                loss: None,
                handover: Handover::default(),
            };
            ToCoordinator::Held { claims: vec![claim], part: 0, last: true }
        }
        14 => ToCoordinator::WorkRequest {
            rooms: vec![(key.step, 9)],
            through: grant,
            service_time: 1,
        },
        _ => ToCoordinator::RoundGroupRequest { round },
    }
}
