//! Registration: a peer becomes a member, or is refused.

use shoal_protocol::ids::{Member, StageSpan};
use shoal_protocol::message::{Candidate, Conviction, FromCoordinator, MemberRecord};
use shoal_protocol::units::Moment;

use super::super::{Out, event, send};
use super::Members;
use crate::action::{CoordinatorEvent, LossCause};
use crate::coordinator::members::membership::AdmissionError;
use crate::coordinator::placing::locality::Load;
use crate::coordinator::placing::throughput::Estimates;

/// What an admission depends on besides the membership.
#[derive(Debug)]
pub(in super::super) struct Terms<'a> {
    pub(in super::super) now: Moment,
    /// Whether a newcomer has the current weights.
    pub(in super::super) serving: bool,
    pub(in super::super) estimates: &'a Estimates<'a>,
    pub(in super::super) load: &'a Load,
    /// The number of members that the run waits for.
    pub(in super::super) wait_for: usize,
}

/// The result of a registration.
#[derive(Debug)]
pub(in super::super) enum Registration {
    /// The peer was refused, has to measure its links first, or stays away for a while yet.
    Rejected,
    /// The peer is a member already.
    Repeated,
    /// The peer is a new member.
    Admitted {
        /// The stages that lost an earlier incarnation of the peer.
        lost: Option<StageSpan>,
        /// The stages of the new member.
        span: StageSpan,
    },
}

impl Members {
    /// Admits a peer, or sends it the reason why not.
    pub(in super::super) fn register(
        &mut self,
        from: Member,
        candidate: Candidate,
        terms: &Terms<'_>,
        out: &mut Out,
    ) -> Registration {
        let Terms { now, serving, estimates, load, wait_for } = *terms;
        if !self.current.contains(from) && self.absences.contains(from.peer, now) {
            // It knows until when, and asks again.
            return Registration::Rejected;
        }
        if let Some(conviction) = self.stays.conviction(from.peer) {
            refuse(from, reason_of(conviction), out);
            return Registration::Rejected;
        }
        match &candidate.link_estimates {
            None if !self.current.contains(from) => {
                let at = self.current.probe_targets(from.peer, &candidate, estimates);
                if !at.is_empty() {
                    send(from, FromCoordinator::ProbeLinks { at }, out);
                    return Registration::Rejected;
                }
            }
            None => {}
            Some(link_estimates) => self.links.note(from.peer, link_estimates),
        }
        let known = (&self.links, load);
        let name = candidate.name.clone();
        match self.current.admit(from, candidate, (serving, wait_for), estimates, known) {
            Err(AdmissionError::Expelled) => {
                let reason = AdmissionError::Expelled.to_string();
                send(from, FromCoordinator::Expelled { reason }, out);
                Registration::Rejected
            }
            Err(error) => {
                refuse(from, error.to_string(), out);
                Registration::Rejected
            }
            Ok(admission) if admission.again => Registration::Repeated,
            Ok(admission) => {
                let mut lost = None;
                if let Some(record) = admission.replaced {
                    let MemberRecord { member, span, .. } = *record;
                    let how = LossCause::Replaced;
                    event(CoordinatorEvent::Lost { member, span, how }, out);
                    lost = self.forget(&record, out);
                }
                let span = admission.span;
                event(CoordinatorEvent::Admitted { member: from, span, name }, out);
                if admission.unlike {
                    event(CoordinatorEvent::Unlike { member: from }, out);
                }
                self.append_change(out);
                Registration::Admitted { lost, span }
            }
        }
    }
}

/// Why a convicted peer is out of the run.
fn reason_of(Conviction { step, stage, evidence, .. }: &Conviction) -> String {
    let step = step.next();
    format!(
        "this peer {}, in step {step} at stage {stage}, so its key is out of the run: check the machine's memory and \
         device with `shoal doctor`; with a sound machine, join with a new key (another --data-dir)",
        evidence.charge()
    )
}

/// Sends a peer the reason why it is not admitted.
pub(in super::super) fn refuse(member: Member, reason: String, out: &mut Out) {
    event(CoordinatorEvent::NotAdmitted { member, reason: reason.clone() }, out);
    send(member, FromCoordinator::Refused { reason }, out);
}
