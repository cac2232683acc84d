//! Membership: the view of the members, its synchronization, and members that left or are unreachable.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Incarnation, Member, PeerId};
use shoal_protocol::message::{MemberRecord, PeerMessage, ToCoordinator, View, ViewChange};
use shoal_protocol::units::Moment;

use super::Out;
use crate::action::PeerAction;
use crate::paging::Pages;

/// Messages that wait for the view which says who their sender is, in all and of one sender. Any other is
/// dropped: its sender repeats it.
const WAITING: usize = 256;
const WAITING_OF_ONE: usize = 16;

/// The members of the run as this peer knows them.
#[derive(Debug, Default)]
pub(super) struct Membership {
    view: View,
    sync: MembershipSync,
    /// Members to which no connection can be made.
    unreachable: BTreeSet<Member>,
    /// The last departed incarnation of each peer. Messages of it and of earlier ones are discarded.
    departed: BTreeMap<PeerId, Incarnation>,
    /// Messages whose sender the view does not list, or not at the stage that they need.
    waiting: VecDeque<(Member, PeerMessage)>,
}

/// A transfer of the whole view, which follows when a change was missed.
#[derive(Debug, Default)]
struct MembershipSync {
    /// The time of the last request while its answer is incomplete.
    requested_at: Option<Moment>,
    pages: Pages<Arc<MemberRecord>>,
}

impl Membership {
    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// Applies a change, or requests the whole view where a change before it is missing. Returns the
    /// departed members if the view changed.
    pub(super) fn apply(
        &mut self,
        now: Moment,
        retry: Duration,
        change: &ViewChange,
        out: &mut Out,
    ) -> Option<BTreeSet<Member>> {
        if change.number <= self.view.number {
            return None;
        }
        let Some(gone) = self.view.take(change) else {
            self.request(now, retry, out);
            return None;
        };
        self.sync = MembershipSync::default();
        Some(gone.into_iter().collect())
    }

    /// Takes one page of the whole view. Returns the departed members if that completes a newer view.
    pub(super) fn take_page(
        &mut self,
        number: u64,
        page: (u32, u32),
        members: Vec<Arc<MemberRecord>>,
    ) -> Option<BTreeSet<Member>> {
        if number <= self.view.number {
            return None;
        }
        let members = self.sync.pages.take(number, page, members)?;
        let old = std::mem::replace(&mut self.view, View { number, members });
        self.sync = MembershipSync::default();
        Some(old.gone_in(&self.view).collect())
    }

    /// Requests the whole view, unless the last request is more recent than the retry interval.
    pub(super) fn request(&mut self, now: Moment, retry: Duration, out: &mut Out) {
        let last = self.sync.requested_at;
        if last.is_none_or(|last| now.since(last) >= retry) {
            self.sync.requested_at = Some(now);
            out.push(PeerAction::ToCoordinator(ToCoordinator::ViewRequest));
        }
    }

    /// Repeats a request whose answer is incomplete.
    pub(super) fn repeat_request(&mut self, now: Moment, retry: Duration, out: &mut Out) {
        if self.sync.requested_at.is_some() {
            self.request(now, retry, out);
        }
    }

    /// Keeps a message until the next view, which may list its sender where the message needs it: that view and
    /// the message come on different connections. Returns whether it does.
    pub(super) fn wait_for_view(&mut self, from: Member, message: PeerMessage) -> bool {
        let departed = self.departed.get(&from.peer).is_some_and(|last| from.incarnation <= *last);
        let of_one = self.waiting.iter().filter(|(sender, _)| *sender == from).count();
        let waits = !departed && of_one < WAITING_OF_ONE && self.waiting.len() < WAITING;
        if waits {
            self.waiting.push_back((from, message));
        }
        waits
    }

    /// Takes the messages that waited for a view.
    pub(super) fn take_waiting(&mut self) -> VecDeque<(Member, PeerMessage)> {
        std::mem::take(&mut self.waiting)
    }

    /// Discards later messages of members that departed.
    pub(super) fn remove(&mut self, departed: &BTreeSet<Member>) {
        for member in departed {
            let last = self.departed.entry(member.peer).or_insert(member.incarnation);
            *last = member.incarnation.max(*last);
        }
        self.unreachable.retain(|member| !departed.contains(member));
    }

    /// Reports a member as unreachable; the coordinator decides whether to expel it.
    pub(super) fn report_unreachable(
        &mut self,
        member: Member,
        coordinator: Option<Member>,
        out: &mut Out,
    ) {
        if self.view.lists(member) {
            self.unreachable.insert(member);
            report(member, coordinator, out);
        }
    }

    /// Repeats the reports of unreachable members once; a later failure adds them again.
    pub(super) fn repeat_unreachable(&mut self, coordinator: Option<Member>, out: &mut Out) {
        for member in std::mem::take(&mut self.unreachable) {
            report(member, coordinator, out);
        }
    }
}

/// Reports an unreachable member, except to that member itself.
fn report(member: Member, coordinator: Option<Member>, out: &mut Out) {
    if coordinator != Some(member) {
        out.push(PeerAction::ToCoordinator(ToCoordinator::CannotReach { member }));
    }
}
