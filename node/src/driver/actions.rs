//! What the state machines want done.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use shoal_metrics::NodeState;
use shoal_protocol::ids::{Era, Member, PeerId, Stage, Step, Term};
use shoal_protocol::message::{
    CommitRecord, LogRecord, Message, PeerMessage, SnapshotPart, StoredFile, StoredStage,
    TensorTag, ToCoordinator, View, proof_of_all,
};
use shoal_scheduler::action::{
    CoordinatorAction, CoordinatorEvent, CoordinatorInput, PayloadId, PeerAction, PeerEvent,
    PeerInput, StepBooks, Task,
};

use shoal_scheduler::coordinator::Coordinator;

use super::chunks::Label;
use super::collect::{Scattered, checked_name, collect, obtain};
use super::resume::{self, FETCHED, KEPT, checkpoint_folder};
use super::staging::Staging;
use super::{Driver, Ending, Gathered, Job, Own, landmarks};
use crate::events::{RunEvent, StepReport, Traffic};
use crate::fault_point::FaultPoint;

/// Versions that a part which is in no checkpoint is kept for: more than any of them takes to fetch
/// it.
const KEPT_VERSIONS: u64 = 32;

impl Driver<'_> {
    pub(super) fn obey_peer(&mut self, actions: Vec<PeerAction>) {
        for action in actions {
            match action {
                PeerAction::ToCoordinator(message) => {
                    let reduced = matches!(message, ToCoordinator::Reduced { .. });
                    self.tell_coordinator(message);
                    if reduced {
                        FaultPoint::Reduced.pass();
                    }
                }
                PeerAction::Send { to, message } => self.tell(to, message),
                PeerAction::SendTensor { to, tag, payload } => self.send_tensor(to, tag, payload),
                PeerAction::ProbeLinks { at } => self.probe_links(at),
                PeerAction::Fetch { version, part } => self.fetch(version, part),
                PeerAction::Keep { version, part } => self.keep(version, part),
                PeerAction::Compute(task) => self.compute(task),
                PeerAction::Release(payload) => self.payloads.release(payload),
                PeerAction::Event(event) => self.peer_event(event),
            }
        }
    }

    pub(super) fn obey_coordinator(&mut self, actions: Vec<CoordinatorAction>) {
        for action in actions {
            match action {
                CoordinatorAction::Send { to, message } => {
                    let Some(coordinator) = self.post.coordinator() else { return };
                    let (era, term) = (coordinator.era(), coordinator.term());
                    if to != self.me {
                        self.send_in((era, term), to, Message::FromCoordinator(message));
                    } else if self.coordinator.obeys(to, term) {
                        // As with any other peer, the era comes with the coordinator's word.
                        self.era = era;
                        let input = PeerInput::FromCoordinator { from: self.me, message };
                        self.own.push_back(Own::Peer(input));
                    }
                }
                CoordinatorAction::Append(record) => {
                    if matches!(record, LogRecord::Commit(_)) {
                        FaultPoint::Committing.pass();
                    }
                    self.post.append(record);
                }
                CoordinatorAction::Anchors(voters) => self.post.want_voters(Some(voters)),
                CoordinatorAction::Event(event) => self.coordinator_event(event),
            }
        }
    }

    pub(super) fn tell_coordinator(&mut self, message: ToCoordinator) {
        match self.coordinator.member() {
            Some(coordinator) if coordinator == self.me => {
                if !self.post.coordinator().is_some_and(Coordinator::is_in_office) {
                    self.unsaid = Some(message);
                    return;
                }
                let from = self.me;
                self.own.push_back(Own::Coordinator(CoordinatorInput::Message { from, message }));
            }
            Some(coordinator) => self.send(coordinator, Message::ToCoordinator(message)),
            // Nobody is known yet. What needs an answer is said again until it has one.
            None => self.unsaid = Some(message),
        }
    }

    fn tell(&mut self, to: Member, message: PeerMessage) {
        if to == self.me {
            let from = self.me;
            self.own.push_back(Own::Peer(PeerInput::PeerMessage { from, message }));
        } else {
            self.send(to, Message::PeerMessage(message));
        }
    }

    pub(super) fn send(&self, to: Member, message: Message) {
        self.send_in((self.era, self.coordinator.term()), to, message);
    }

    fn send_in(&self, (era, term): (Era, Term), to: Member, message: Message) {
        // What is for others of its own lives, or for the company that one of them had, is for nobody.
        let Some(links) = self.links.as_ref().filter(|_| to.peer != self.me.peer) else { return };
        links.send(self.me, to, era, term, message);
    }

    fn send_tensor(&mut self, to: Member, tag: TensorTag, payload: PayloadId) {
        if to == self.me {
            let payload = self.payloads.share(payload);
            let from = self.me;
            self.own.push_back(Own::Peer(PeerInput::Tensor { from, tag, payload }));
        } else {
            let links = self.links.as_ref().expect("a peer that is alone sends to itself only");
            match tag {
                TensorTag::ActivationGradient { .. } => FaultPoint::GradientUnsent.pass(),
                TensorTag::RoundPart { .. } => FaultPoint::Reducing.pass(),
                TensorTag::Activation { .. } | TensorTag::RoundResult { .. } => {}
            }
            links.send_tensors(to, tag, self.payloads.get(payload), &self.gathered.0);
            if matches!(tag, TensorTag::Activation { .. }) {
                FaultPoint::ForwardSent.pass();
            }
        }
    }

    fn compute(&mut self, task: Task) {
        let ids: Vec<PayloadId> = match &task {
            Task::Forward { activation, .. } => activation.iter().copied().collect(),
            Task::Backward { gradient, .. } => gradient.iter().copied().collect(),
            Task::Reduce { parts, .. } => parts.clone(),
            Task::Install { payload, .. } => vec![*payload],
            Task::Accumulate { .. }
            | Task::Discard { .. }
            | Task::Export { .. }
            | Task::Summarise { .. }
            | Task::Apply { .. }
            | Task::Restore { .. }
            | Task::Leave { .. }
            | Task::Store { .. } => Vec::new(),
        };
        let inputs = ids.into_iter().map(|id| self.payloads.get(id)).collect();
        self.engine.as_ref().expect("a member has an engine").give(Job { task, inputs });
    }

    fn peer_event(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Admitted { span } => {
                if let Err(error) = self.open_workshop(span) {
                    self.ending.get_or_insert(Ending::Stopped(format!("{error:#}")));
                }
                self.note(&RunEvent::Joined { span });
            }
            PeerEvent::Rewound { era, version } => {
                self.era = era;
                self.meters.stands(version);
                tracing::warn!(%era, %version, "the run goes back");
            }
            PeerEvent::Serving { version } => {
                self.meters.stands(version);
                self.note(&RunEvent::Serving { version: version.0 });
            }
            PeerEvent::Drained => {
                self.ending.get_or_insert(Ending::Drained);
            }
            PeerEvent::Expelled { reason } => {
                self.ending.get_or_insert(Ending::Expelled(reason));
            }
            PeerEvent::Refused { reason } => {
                self.ending.get_or_insert(Ending::Refused(reason));
            }
            PeerEvent::View => self.meet(self.peer.view().clone()),
            PeerEvent::Checkpoint { version, stages, oldest } => {
                self.checkpoint_completed(version, stages, oldest);
            }
            PeerEvent::Applied { record } => self.report_step(&record, None),
            PeerEvent::Counted { .. } => {}
            PeerEvent::MoveBegun { to, reason } => {
                tracing::info!(stage = %to, reason = reason.words(), "fetching another stage, to host it instead");
            }
            PeerEvent::Moved { from, to, at } => {
                self.note(&RunEvent::Moved { from, to: to.0, step: at.0 });
            }
            PeerEvent::MoveCancelled { to } => {
                tracing::info!(stage = %to, "needed where it is: it stays");
            }
            PeerEvent::ResultLost { step, .. } => {
                tracing::warn!(step = step.0, "a result was lost on the way: beginning anew");
            }
            PeerEvent::Fault(fault) => {
                self.meters.fault(&fault);
                tracing::error!(%fault, "fault");
            }
            PeerEvent::Finished => {
                let sent = self.links.as_ref().map(|links| links.transport.traffic());
                let sent = sent.map_or_else(Traffic::default, |traffic| Traffic {
                    control: traffic.control.sent.0,
                    tensor: traffic.tensor.sent.0,
                    file: traffic.file.sent.0,
                    relay: traffic.relay.sent.0,
                });
                self.note(&RunEvent::Finished { sent });
                self.meters.is(NodeState::Finished);
                self.begin_farewell();
                self.ending.get_or_insert(Ending::Finished);
            }
            PeerEvent::Stopped { reason } => {
                if self.ending.is_none() {
                    self.note(&RunEvent::Stopped { reason: reason.clone() });
                    self.ending = Some(Ending::Stopped(reason));
                }
            }
        }
    }

    /// Notes where the other members are.
    fn meet(&mut self, view: View) {
        self.meters.members(&view, self.me, &self.manifest);
        self.meet_addresses(&view);
        self.view = view;
    }

    /// Notes where members are, and who of them may keep the run.
    pub(super) fn meet_addresses(&mut self, view: &View) {
        self.coordinator.view(view);
        let Some(links) = &self.links else { return };
        links.transport.set_members(view.members.iter().map(|record| record.member.peer));
        for record in &view.members {
            let reachable: Vec<_> = record
                .addresses
                .iter()
                .copied()
                .filter(|address| !address.ip().is_unspecified())
                .collect();
            links.transport.remember(record.member.peer, &reachable);
        }
    }

    fn coordinator_event(&mut self, event: CoordinatorEvent) {
        self.meters.befell(&event, &self.manifest);
        match event {
            CoordinatorEvent::Admitted { member, span } => {
                self.note(&RunEvent::Admitted { peer: member.peer, span });
            }
            CoordinatorEvent::Waiting { stages, members } => {
                let stages = stages.into_iter().map(|stage| stage.0).collect();
                self.note(&RunEvent::Waiting { stages, members });
            }
            CoordinatorEvent::Opened { step } => {
                self.lookout.opened();
                // Later steps begin with the commit before.
                if step == Step(0) {
                    self.step_began = self.now();
                }
            }
            CoordinatorEvent::Committed { record, books } => self.report_step(&record, Some(books)),
            CoordinatorEvent::Rewound { version, steps, .. } => {
                self.note(&RunEvent::Rewound { version: version.0, steps });
            }
            CoordinatorEvent::BecameCoordinator { term, claims } => {
                self.note(&RunEvent::BecameCoordinator { term: term.0, claims });
            }
            CoordinatorEvent::StageLost { stages, version } => {
                let stages = stages.into_iter().map(|stage| stage.0).collect();
                self.note(&RunEvent::StageLost { stages, version: version.0 });
            }
            CoordinatorEvent::MoveBegun { member, from, to, reason } => {
                let (peer, to) = (member.peer, to.0);
                self.note(&RunEvent::MoveBegun { peer, from, to, reason });
            }
            CoordinatorEvent::Moves { member, from, to, at, reason } => {
                let (peer, to, step) = (member.peer, to.0, at.0);
                self.note(&RunEvent::Moves { peer, from, to, step, reason });
            }
            CoordinatorEvent::MoveCancelled { member, to, reason, obstacle } => {
                let (peer, to, obstacle) = (member.peer, to.0, obstacle.words().to_owned());
                self.note(&RunEvent::MoveCancelled { peer, to, reason, obstacle });
            }
            CoordinatorEvent::Lost { member, span, how } => {
                self.note(&RunEvent::Lost { peer: member.peer, span, how });
            }
            // The same word comes to this process's peer, which ends it.
            CoordinatorEvent::Finished | CoordinatorEvent::Stopped { .. } => {}
            event => log(&event),
        }
    }

    /// A checkpoint is complete: who archives brings it together, and what is of no more use goes.
    fn checkpoint_completed(&mut self, version: Step, stages: Vec<StoredStage>, oldest: Step) {
        self.meters.checkpoint_completed(version);
        self.kept.insert(version);
        self.kept.retain(|kept| *kept >= oldest);
        self.newest = Some((version, stages.clone()));
        if let Some(archive) = self.post.archive.clone() {
            let last = version.0 == self.manifest.training.steps;
            let destination = checkpoint_folder(&archive, version, last);
            Staging::forget_others(&destination);
            let scattered = Scattered { version, stages, destination };
            let transport = self.links.as_ref().map(|links| links.transport.clone());
            let collecting =
                collect(scattered, Arc::clone(&self.manifest), self.files.clone(), transport);
            let done = self.gathered.0.clone();
            self.archiving += 1;
            self.tracker.spawn(async move {
                let whole = collecting.await;
                // The driver that no longer listens is closing.
                let _ = done.send(Gathered::Checkpoint { version, whole }).await;
            });
        }
    }

    /// Removes the parts of versions that nobody fetches any more.
    fn forget_old_parts(&self, now: Step) {
        let old =
            |version: Step| version.0 + KEPT_VERSIONS <= now.0 && !self.kept.contains(&version);
        resume::forget_parts(&self.workshop.data_dir, &self.files, old);
    }

    /// Fetches a stage of a snapshot into a folder of its own.
    fn fetch(&self, version: Step, part: SnapshotPart) {
        let stage = part.stage;
        let (whole, done) = (self.obtain(FETCHED, version, part), self.gathered.0.clone());
        // Who comes to the first stage from another reads the text from now on.
        let (text, holders) = (self.text(), self.text_holders());
        let transport = self.links.as_ref().map(|links| links.transport.clone());
        self.tracker.spawn(async move {
            let mut whole = whole.await;
            if stage == Stage(0) && whole.is_ok() {
                whole = text.obtain(transport, holders).await;
            }
            let _ = done.send(Gathered::Snapshot { version, stage, whole }).await;
        });
    }

    /// Keeps a stage of a checkpoint for others.
    fn keep(&mut self, version: Step, part: SnapshotPart) {
        self.kept.insert(version);
        let stage = part.stage;
        let (whole, done) = (self.obtain(KEPT, version, part), self.gathered.0.clone());
        self.tracker.spawn(async move {
            let whole = whole.await;
            let _ = done.send(Gathered::Kept { version, stage, whole }).await;
        });
    }

    /// Measures the links to these members.
    fn probe_links(&self, at: Vec<(PeerId, Vec<SocketAddr>)>) {
        let Some(links) = &self.links else { return };
        let (transport, done) = (links.transport.clone(), self.gathered.0.clone());
        self.tracker.spawn(async move {
            let link_estimates = landmarks::paths_to(&transport, at).await;
            // The driver that no longer listens is closing.
            let _ = done.send(Gathered::LinksProbed(link_estimates)).await;
        });
    }

    /// Brings the files of a stage into one of the folders for parts, and offers them.
    fn obtain(
        &self,
        folder: &'static str,
        version: Step,
        part: SnapshotPart,
    ) -> impl Future<Output = anyhow::Result<()>> + Send + 'static {
        let folder = self.workshop.data_dir.join(folder).join(version.to_string());
        let (files, me, run) = (self.files.clone(), self.me.peer, self.manifest.run_id());
        let transport = self.links.as_ref().map(|links| links.transport.clone());
        async move {
            tokio::fs::create_dir_all(&folder)
                .await
                .with_context(|| format!("{} cannot be made", folder.display()))?;
            for StoredFile { name, hash, .. } in &part.stored.files {
                let label = Label { run, hash: *hash };
                label.write(&folder, checked_name(name)?).context("no label is written")?;
            }
            obtain(&part.stored, me, &folder, &files, transport.as_ref()).await?;
            for file in part.stored.files {
                files.offer(file.hash, folder.join(&file.name));
            }
            Ok(())
        }
    }

    /// Tells of a committed step, once: the coordinator, where it is here, does so first.
    fn report_step(&mut self, record: &CommitRecord, books: Option<StepBooks>) {
        if self.told.is_some_and(|told| told >= (record.era, record.step)) {
            return;
        }
        self.told = Some((record.era, record.step));
        self.forget_old_parts(record.step);
        let now = self.now();
        let seconds = now.since(self.step_began).as_secs_f64();
        self.step_began = now;
        let training = &self.manifest.training;
        let report = StepReport {
            step: record.step.0,
            loss: record.loss.mean(training.microbatches),
            held_out_loss: record
                .held_out_loss
                .map(|loss| loss.mean(self.manifest.evaluation.microbatches)),
            gradient_norm: record.gradient_norm,
            tokens: self.manifest.tokens_per_step(),
            seconds,
            counted: proven(record, training.stages, training.microbatches),
            all_reduce_seconds: books.map(|books| books.all_reduce.as_secs_f64()),
            replayed: books.map_or(0, |books| books.replayed),
            duplicated: books.map_or(0, |books| books.repeated),
            peers: self.view.members.len(),
        };
        self.meters.committed(record.era, &report, &self.manifest);
        self.note(&RunEvent::Committed(report));
    }
}

/// What the coordinator did that only its log tells.
fn log(event: &CoordinatorEvent) {
    match event {
        CoordinatorEvent::NotAdmitted { member, reason } => {
            tracing::warn!(peer = %member, reason, "not admitted");
        }
        CoordinatorEvent::RoundsAborted { step, rounds, late } => {
            tracing::info!(%step, rounds, late, "all-reduces are tried again");
        }
        CoordinatorEvent::RoundMended { round, gone, changed } => {
            let (step, stage) = (round.step, round.stage);
            tracing::info!(%step, %stage, gone, changed, "an all-reduce goes on without some");
        }
        CoordinatorEvent::ClaimRefused { member, key } => {
            tracing::warn!(peer = %member, %key, "it claims what it does not hold: refused");
        }
        CoordinatorEvent::Reclaimed { member, key } => {
            tracing::info!(peer = %member, %key, "late work is given to another");
        }
        CoordinatorEvent::Revoked { member, claims } => {
            tracing::info!(peer = %member, claims, "claims taken back");
        }
        CoordinatorEvent::CheckpointAbandoned { version } => {
            tracing::warn!(%version, "a checkpoint was abandoned: a peer that wrote it is gone");
        }
        CoordinatorEvent::CheckpointStored { version, .. } => {
            tracing::info!(%version, "a checkpoint is complete");
        }
        CoordinatorEvent::Unlike { member } => tracing::warn!(
            peer = %member,
            "its known answers differ from the first member's: exactly-once holds, \
             the reference's bits may not"
        ),
        CoordinatorEvent::Admitted { .. }
        | CoordinatorEvent::Waiting { .. }
        | CoordinatorEvent::Opened { .. }
        | CoordinatorEvent::Committed { .. }
        | CoordinatorEvent::Rewound { .. }
        | CoordinatorEvent::BecameCoordinator { .. }
        | CoordinatorEvent::StageLost { .. }
        | CoordinatorEvent::MoveBegun { .. }
        | CoordinatorEvent::Moves { .. }
        | CoordinatorEvent::MoveCancelled { .. }
        | CoordinatorEvent::Lost { .. }
        | CoordinatorEvent::Finished
        | CoordinatorEvent::Stopped { .. } => {}
    }
}

/// How many microbatches the record's proofs cover, over all stages: a stage whose proof is the
/// whole batch's counted each of them once.
fn proven(record: &CommitRecord, stages: u16, microbatches: u32) -> u64 {
    let whole = |stage: u16| proof_of_all(record.step, Stage(stage), microbatches);
    let right = (0..stages)
        .zip(&record.stages)
        .filter(|(stage, (_, outcome))| outcome.proof == whole(*stage))
        .count();
    right as u64 * u64::from(microbatches)
}
