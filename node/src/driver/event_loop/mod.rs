//! The event loop: receives events, hands each to the component that it concerns, and carries out
//! the effects.

mod actions;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use shoal_metrics::{Preemption, Refusal};
use shoal_protocol::history::History;
use shoal_protocol::ids::{Member, Term};
use shoal_protocol::message::{
    Envelope, Message, Signatures, TensorHeader, TermProof, ToCoordinator,
};
use shoal_protocol::net::identity::Identity;
use shoal_scheduler::action::{CoordinatorInput, Payload, PeerInput, TaskResult};
use shoal_scheduler::peer::Peer;
use tokio::sync::watch;

use crate::anchor::AnchorEvent;
use crate::driver::anchor_role::AnchorRole;
use crate::driver::background_results::{Background, BackgroundResult};
use crate::driver::checkpoint_shelf::CheckpointShelf;
use crate::driver::context::Context;
use crate::driver::coordination::Coordination;
use crate::driver::earlier_curves::EarlierCurves;
use crate::driver::effect::{Effect, Effects, LocalInput, Stamp};
use crate::driver::engine_host::{EngineHost, EngineSetup};
use crate::driver::job_report::JobDone;
use crate::driver::link_events::LinkEvent;
use crate::driver::metrics_update::MetricsUpdate;
use crate::driver::observer::Observer;
use crate::driver::own_pause::WAKES;
use crate::driver::peer_names::PeerNames;
use crate::driver::peer_network::{NetworkEvent, PeerNetwork};
use crate::driver::resource_budget::ResourceBudget;
use crate::driver::run_files::FileHolders;
use crate::driver::setup::Setup;
use crate::driver::shutdown::{Ending, Outcome, Shutdown, ShutdownEvent};
use crate::driver::startup_probes::{self, new_peer};
use crate::driver::status_feed::StatusFeed;
use crate::driver::status_snapshot::Sources;
use crate::driver::timers::sleep_to;
use crate::signals::{Attended, Signals, source_of};

/// Takes part in a run until it is over, or until a signal asks the peer to leave.
///
/// # Errors
/// When the run cannot go on, or this process cannot.
pub async fn run(
    setup: Setup,
    observer: &mut dyn Observer,
    signals: &mut Signals,
) -> anyhow::Result<Outcome> {
    let mut driver = Driver::new(setup, observer).await?;
    let completed = driver.coordination.anchor_role().has_completed(&driver.context);
    let outcome =
        if completed { driver.finish_upload().await } else { driver.drive(signals).await };
    driver.close().await;
    outcome
}

/// An event of any source.
enum Event {
    /// A result of the engine's thread; `None` after it panicked.
    Engine(Option<Box<JobDone>>),
    Network(NetworkEvent),
    /// An event of the local anchor; `None` after it ended.
    Anchor(Option<AnchorEvent>),
    Background(BackgroundResult),
    /// A timeout of a state machine.
    Tick,
    /// The coordinator has been unreachable for too long.
    CoordinatorLost,
    Shutdown(ShutdownEvent),
    /// The loop runs, though nothing has happened.
    Awake,
}

/// Owns the components, and the queue of inputs for the local state machines.
struct Driver<'a> {
    context: Context,
    peer: Peer,
    inputs: VecDeque<LocalInput>,
    engine: EngineHost,
    network: PeerNetwork,
    coordination: Coordination,
    checkpoints: CheckpointShelf,
    background: Background,
    shutdown: Shutdown,
    status: StatusFeed<'a>,
    earlier_curves: EarlierCurves,
}

impl<'a> Driver<'a> {
    async fn new(setup: Setup, observer: &'a mut dyn Observer) -> anyhow::Result<Self> {
        let run = (&*setup.manifest, setup.choice);
        let budget = ResourceBudget::measure(setup.limits, &setup.devices, &setup.data_dir, run)?;
        let passes = startup_probes::passes_of(&setup)?;
        let keys: Arc<dyn Signatures> = match &setup.network {
            Some(network) => network.transport.keys(),
            // Alone it signs for itself, and no other peer checks it.
            None => Arc::new(Identity::ephemeral()),
        };
        let (peer, room) = new_peer(&setup, &budget, passes, keys.clone()).await?;
        let Setup { me, devices, network, role, name, island, .. } = setup;
        let (file_holders, holders) = watch::channel(FileHolders::default());
        let context = Context {
            manifest: setup.manifest,
            me,
            data_dir: setup.data_dir,
            archive: role.archive.clone(),
            files: setup.files,
            mirrors: setup.mirrors.into(),
            data_cache: setup.limits.data_cache,
            transport: network.as_ref().map(|network| network.transport.clone()),
            file_holders: holders,
            names: PeerNames::default(),
            keys,
            clock: Instant::now(),
        };
        let anchor_role = AnchorRole::open(&role, &context).await?;
        let (manifest, history) = (&context.manifest, anchor_role.history());
        let metrics = MetricsUpdate::new(setup.metrics.clone(), manifest, passes, history.as_ref());
        metrics.known_as(me.peer, name.as_ref(), island.as_ref(), &devices.each);
        let peak = match setup.watched {
            true => {
                Some(startup_probes::peak_flops(manifest, &devices.each, devices.threads).await?)
            }
            false => None,
        };
        metrics.budget(budget.memory(), budget.log_memory(), peak);
        for _ in 0..startup_probes::offer_kept(&context).await? {
            metrics.refused(Refusal::Checkpoint);
        }
        let slow_down = setup.slow_down;
        let engine = EngineSetup { devices, slow_down, budget, room };
        Ok(Self {
            peer,
            inputs: VecDeque::new(),
            network: PeerNetwork::new(&context, network, setup.metrics),
            engine: EngineHost::new(engine, &context.manifest),
            coordination: Coordination::new(&context, role.coordinator, anchor_role, file_holders),
            checkpoints: CheckpointShelf::new(history.as_ref(), &role),
            background: Background::new(),
            shutdown: Shutdown::new(setup.leaving),
            status: StatusFeed::new(observer, metrics),
            earlier_curves: EarlierCurves::default(),
            // Moments count from the end of the measurements.
            context: Context { clock: Instant::now(), ..context },
        })
    }

    /// Runs until this life ends.
    async fn drive(&mut self, signals: &mut Signals) -> anyhow::Result<Outcome> {
        let mut signals = signals.attend();
        self.begin();
        loop {
            self.settle();
            self.update_status();
            if let Some(outcome) = self.outcome()? {
                return Ok(outcome);
            }
            let event = self.next(&mut signals).await?;
            self.handle(event)?;
        }
    }

    /// How this life ended, if it did.
    fn outcome(&mut self) -> anyhow::Result<Option<Outcome>> {
        let anchor_role = self.coordination.anchor_role();
        let completed = || anchor_role.has_completed(&self.context);
        let ending = self.shutdown.take_ending(self.checkpoints.is_busy(), completed);
        let Some(ending) = ending else { return Ok(None) };
        let outcome = ending.outcome(completed)?;
        if matches!(outcome, Outcome::Finished | Outcome::Complete) {
            self.checkpoints.check_uploaded(&self.context)?;
        }
        Ok(Some(outcome))
    }

    /// Completes the upload that an earlier process began before the run was over.
    async fn finish_upload(&mut self) -> anyhow::Result<Outcome> {
        self.checkpoints.resume(&self.context, &self.background);
        while self.checkpoints.is_archiving() {
            let mut out = Effects::new();
            let result = self.background.next().await;
            self.background_result(result, &mut out);
            self.execute(out);
        }
        self.checkpoints.check_uploaded(&self.context).map(|()| Outcome::Complete)
    }

    fn begin(&mut self) {
        self.status.started(&self.context.manifest);
        self.checkpoints.resume(&self.context, &self.background);
        if let Some(history) = self.coordination.anchor_role().history() {
            self.coordination.members_logged(&history.view);
            self.network.members_changed(&history.view);
        }
        let mut actions = Vec::new();
        self.peer.start(self.context.now(), &mut actions);
        self.apply_peer_actions(actions);
    }

    /// Hands the state machines the inputs that they caused for each other, until none is left.
    fn settle(&mut self) {
        self.send_pending();
        while let Some(input) = self.inputs.pop_front() {
            let now = self.context.now();
            match input {
                LocalInput::Peer(input) => {
                    let mut actions = Vec::new();
                    self.peer.handle(now, input, &mut actions);
                    self.apply_peer_actions(actions);
                }
                LocalInput::Coordinator(input) => {
                    let actions = self.coordination.handle(now, input);
                    self.apply_coordinator_actions(actions);
                }
            }
            self.send_pending();
        }
    }

    fn send_pending(&mut self) {
        let mut out = Effects::new();
        self.coordination.send_pending(&mut out);
        self.execute(out);
    }

    fn update_status(&mut self) {
        let Self { context, peer, engine, network, coordination, checkpoints, .. } = self;
        let view = coordination.view();
        self.status.metrics().load(&peer.load(), engine.payloads().log_use());
        if let Some(transport) = &context.transport {
            self.status.metrics().links(transport, view);
        }
        if self.status.is_due(view.number) {
            let sources = Sources { context, peer, engine, network, coordination, checkpoints };
            self.status.update(context, sources.snapshot());
            let unreachable = coordination.contact().unreachable_for();
            self.status.coordinator_unreachable_for(unreachable);
        }
        if let Some(refusals) = network.refusals() {
            self.status.refused_connections(refusals);
        }
        self.ask_for_curves();
    }

    /// Waits for the next event.
    async fn next(&mut self, signals: &mut Attended<'_>) -> anyhow::Result<Event> {
        let timeouts = [self.peer.next_timeout(), self.coordination.next_timeout()];
        let timeout = timeouts.into_iter().flatten().min();
        let timeout = timeout.map(|moment| self.context.instant(moment));
        let coordinator_lost = self.coordination.contact().wait_ends();
        Ok(tokio::select! {
            done = self.engine.next() => Event::Engine(done.map(Box::new)),
            event = self.network.next() => Event::Network(event?),
            event = self.coordination.next_anchor_event() => Event::Anchor(event),
            result = self.background.next() => Event::Background(result),
            () = sleep_to(timeout) => Event::Tick,
            () = sleep_to(coordinator_lost) => Event::CoordinatorLost,
            event = self.shutdown.next(signals) => Event::Shutdown(event),
            () = tokio::time::sleep(WAKES) => Event::Awake,
        })
    }

    fn handle(&mut self, event: Event) -> anyhow::Result<()> {
        let mut out = Effects::new();
        self.coordination.runs(&mut out);
        match event {
            Event::Engine(done) => {
                let done = self.engine_done(done.map(|done| *done), &mut out);
                done.inspect_err(|_| self.leave_at_once())?;
            }
            Event::Network(NetworkEvent::Link(incoming)) => {
                let receiver = self.coordination.receiver();
                if let Some(event) = self.network.receive(incoming, receiver) {
                    self.link_event(event, &mut out);
                }
            }
            Event::Network(NetworkEvent::Admission) => {
                self.network.announce_access_list(self.coordination.stamp(), &mut out);
            }
            Event::Network(NetworkEvent::OwnPort(port)) => self.status.own_port(port),
            Event::Anchor(event) => self.anchor_event(event, &mut out),
            Event::Background(result) => self.background_result(result, &mut out),
            Event::Tick => {
                out.push(PeerInput::Tick.into());
                out.push(CoordinatorInput::Tick.into());
                self.coordination.tick(&mut out);
                self.status.metrics().anchor_role(self.coordination.anchor_role());
            }
            Event::CoordinatorLost => {
                let reason = "the coordinator has been unreachable for too long".to_owned();
                out.push(Ending::Orphaned(reason).into());
            }
            Event::Shutdown(event) => self.shutdown_event(event, &mut out)?,
            Event::Awake => {}
        }
        self.execute(out);
        Ok(())
    }

    fn execute(&mut self, effects: Effects) {
        for effect in effects {
            match effect {
                Effect::Local(input) => self.inputs.push_back(input),
                Effect::Send { to, stamp, message } => self.network.send(to, stamp, message),
                Effect::Redirect { to } => self.redirect(to),
                Effect::Refuse { from, error } => {
                    let reason = self.network.refuse(from, &error);
                    self.status.metrics().refused(reason);
                }
                Effect::Unentitled { from, what } => {
                    self.network.strike(from, what, self.coordination.view());
                    self.status.metrics().refused(Refusal::Sender);
                }
                Effect::Note(event) => self.status.note(&event),
                Effect::End(ending) => self.shutdown.end(ending),
            }
        }
    }

    fn engine_done(&mut self, done: Option<JobDone>, out: &mut Effects) -> anyhow::Result<()> {
        let done = done.context("the engine's thread panicked")?;
        let JobDone { result, busy, swapped, footprints, routing } = done;
        let result = result?;
        self.status.metrics().computed(&result, busy);
        self.status.metrics().swapped(swapped);
        self.status.metrics().devices_have(footprints.as_deref().unwrap_or_default());
        if let Some((stage, routing)) = &routing {
            self.status.metrics().routed(*stage, routing);
        }
        if matches!(result, TaskResult::Summarised { .. }) {
            // The report of the round's result carries the measured links.
            let links = self.network.measured_links(self.coordination.view());
            out.push(PeerInput::Links(links).into());
        }
        out.push(PeerInput::Done { result, busy }.into());
        Ok(())
    }

    fn link_event(&mut self, event: LinkEvent, out: &mut Effects) {
        match event {
            LinkEvent::Connected { member, .. } => {
                self.tell_the_end(member, out);
                self.coordination.connected(member, out);
            }
            LinkEvent::Disconnected { member, reason } => {
                out.push(PeerInput::Disconnected { member }.into());
                self.coordination.lost(member, &reason, out);
            }
            LinkEvent::Unreachable { peer, error } => {
                self.coordination.unreachable(peer, &error, out);
            }
            LinkEvent::Message { from, envelope } => self.message(from, envelope, out),
            LinkEvent::Tensors { from, header: TensorHeader { tag, seal }, tensors, hash } => {
                let payload = self.engine.payloads().keep_hashed(tensors, hash);
                let payload = Payload { seal, ..payload };
                out.push(PeerInput::Tensor { from, tag, payload }.into());
            }
            LinkEvent::Unusable { from, error } => out.push(Effect::Refuse { from, error }),
        }
    }

    fn message(&mut self, from: Member, envelope: Envelope, out: &mut Effects) {
        let stamp = Stamp { era: envelope.era, term: envelope.term };
        match envelope.message {
            Message::ToCoordinator(message) => {
                let message = self.network.with_observed_address(from, message);
                let message = self.network.with_granted_duties(from, message);
                self.coordination.receive_for_coordinator(from, stamp, message, out);
            }
            Message::FromCoordinator(message) => {
                self.coordination.receive_from_coordinator(from, stamp, message, out);
            }
            Message::PeerMessage(message) => {
                out.push(PeerInput::PeerMessage { from, message }.into())
            }
            Message::Anchor(message) => self.coordination.receive_from_anchor(from, message, out),
            Message::AccessList { signed } => {
                if let Some(reason) = self.network.receive_access_list(from, &signed) {
                    self.status.metrics().refused(reason);
                }
            }
            Message::CheckpointRequest => self.answer_checkpoint(from, out),
            // Only a process that is no member asks for one.
            Message::Checkpoint { .. } => {}
            Message::CurvesRequest => self.answer_curves(from, out),
            Message::Curves(curves) => {
                if self.earlier_curves.is_answer(from) {
                    self.status.add_earlier(curves);
                } else {
                    out.push(Effect::Unentitled { from, what: "curves" });
                }
            }
            Message::Elected { proofs } => self.coordination.learn(from, proofs, out),
            Message::CoordinatorMoved { coordinator, addresses, proofs } => {
                self.coordination.learn(from, proofs, out);
                if self.coordination.redirected(from, coordinator) {
                    self.network.remember(coordinator.peer, &addresses);
                } else {
                    out.push(Effect::Unentitled { from, what: "the name of a coordinator" });
                }
            }
        }
    }

    /// Answers with the holders of the newest checkpoint, or with the peer that may know them.
    fn answer_checkpoint(&self, to: Member, out: &mut Effects) {
        let logged = || self.coordination.newest_logged_checkpoint();
        let view = self.coordination.view();
        let addresses = |peer| self.network.addresses_of(view, peer);
        let newest = self.checkpoints.saved(logged, addresses);
        if newest.is_none() && self.coordination.anchor_role().coordinator().is_none() {
            out.push(Effect::Redirect { to });
            return;
        }
        let message = Message::Checkpoint { newest };
        out.push(Effect::Send { to, stamp: self.coordination.stamp(), message });
    }

    /// Answers with the curves that this peer has.
    fn answer_curves(&mut self, to: Member, out: &mut Effects) {
        if self.earlier_curves.may_ask(to, self.coordination.view()) {
            let message = Message::Curves(self.status.earlier_curves());
            out.push(Effect::Send { to, stamp: self.coordination.stamp(), message });
        } else {
            out.push(Effect::Unentitled { from: to, what: "a request for curves" });
        }
    }

    /// Asks another member for the curves of the steps that this one has not seen.
    fn ask_for_curves(&mut self) {
        if !self.status.lacks_curves_after(self.context.manifest.first_version()) {
            return;
        }
        let (now, view) = (self.context.now(), self.coordination.view());
        if let Some(to) = self.earlier_curves.next(now, self.context.me, view) {
            self.network.send(to, self.coordination.stamp(), Message::CurvesRequest);
        }
    }

    /// Answers with the coordinator's addresses, if that is another peer.
    fn redirect(&self, to: Member) {
        let Some(coordinator) = self.coordination.coordinator_for(to) else { return };
        let addresses = self.network.addresses_of(self.coordination.view(), coordinator.peer);
        let proofs = self.coordination.contact().proofs().to_vec();
        let message = Message::CoordinatorMoved { coordinator, addresses, proofs };
        self.network.send(to, self.coordination.stamp(), message);
    }

    fn anchor_event(&mut self, event: Option<AnchorEvent>, out: &mut Effects) {
        if self.shutdown.ignores(event.as_ref()) {
            return;
        }
        match event {
            Some(AnchorEvent::Leads { term, history, proof }) => self.lead(term, *history, *proof),
            event => {
                self.coordination.anchor_event(&self.context, &self.background, event, out);
            }
        }
    }

    /// Starts the local coordinator: the anchors elected this one.
    fn lead(&mut self, term: Term, history: History, proof: TermProof) {
        self.coordination.members_logged(&history.view);
        self.network.members_changed(&history.view);
        // The newest records count only since this election.
        self.status.metrics().resumed(&history);
        let actions = self.coordination.lead(&self.context, (term, proof), history);
        self.apply_coordinator_actions(actions);
    }

    fn background_result(&mut self, result: BackgroundResult, out: &mut Effects) {
        match result {
            BackgroundResult::Files(result) => {
                if result.is_failed_checkpoint() {
                    self.status.metrics().checkpoint_failed();
                }
                if result.is_failed_upload() {
                    self.status.metrics().upload_failed();
                }
                self.checkpoints.finished(&self.context, &self.background, result, out);
            }
            BackgroundResult::LogLost(error) => {
                self.leave_at_once();
                out.push(Ending::Failed(error).into());
            }
            BackgroundResult::LatencyMeasured(links) => {
                out.push(PeerInput::LinksProbed(links).into())
            }
            BackgroundResult::Gone(members) => {
                let gone = |member| CoordinatorInput::Disconnected { member }.into();
                out.extend(members.into_iter().map(gone));
            }
        }
    }

    fn shutdown_event(&mut self, event: ShutdownEvent, out: &mut Effects) -> anyhow::Result<()> {
        match event {
            ShutdownEvent::Leave(preemption) => self.drain(preemption, out)?,
            ShutdownEvent::DrainTimeout => {
                tracing::warn!("the drain took too long: others do again what is not finished");
                self.leave_at_once();
                out.push(Ending::Drained.into());
            }
            ShutdownEvent::WaitOver => {}
        }
        Ok(())
    }

    /// Informs the coordinator that this process ends, so that others do its work again without a wait.
    fn leave_at_once(&mut self) {
        let mut last = Effects::new();
        self.coordination.send(ToCoordinator::Leave, &mut last);
        self.execute(last);
    }

    /// Leaves in order, within the drain timeout. A second request ends the process at once.
    fn drain(&mut self, preemption: Preemption, out: &mut Effects) -> anyhow::Result<()> {
        let source = source_of(preemption);
        if self.shutdown.is_draining() || self.context.transport.is_none() {
            self.leave_at_once();
            bail!("interrupted by {source}");
        }
        self.status.draining(preemption, source);
        self.shutdown.drain();
        // Where the run stands still until this peer is started again, only a checkpoint is worth a wait.
        let at_once = self.coordination.is_indispensable() && !self.peer.saves_before_leaving();
        out.push(if at_once { Ending::Drained.into() } else { PeerInput::Drain.into() });
        Ok(())
    }

    async fn close(&mut self) {
        self.status.metrics().over();
        self.coordination.close().await;
        self.background.close();
        self.network.close().await;
        self.engine.close().await;
    }
}
