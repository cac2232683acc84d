//! Anchors on one machine, with links that can be cut.

mod alone;
mod faulty_run;
mod group;
mod net;
mod proofs;
mod storage;
mod strangers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{
    ContentHash, Incarnation, Member, PeerId, RunId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{
    AnchorMessage, Founding, LogRecord, MemberRecord, StoredFile, StoredStage, TermProof,
    ViewChange,
};
use shoal_protocol::units::Bytes;
use shoal_scheduler::sim::HashKeys;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use net::{End, Net};

use super::{Anchor, AnchorConfig, AnchorError, AnchorEvent, Links, Timing, Voucher};

/// Timeout of every wait, far above what it takes.
const LONG: Duration = Duration::from_secs(30);

fn peer(number: u8) -> PeerId {
    PeerId([number; 32])
}

fn run() -> RunId {
    RunId::of(b"run")
}

fn quick() -> Timing {
    Timing {
        heartbeat: Duration::from_millis(20),
        election: Duration::from_millis(150)..Duration::from_millis(300),
    }
}

/// A record that leaves a distinct trace in every history that has it: incarnation `trace`.
fn record(number: u64, trace: u64) -> LogRecord {
    let mut key = [7; 32];
    key[..8].copy_from_slice(&trace.to_le_bytes());
    let member = Member { peer: PeerId(key), incarnation: Incarnation(1) };
    let record = MemberRecord::plain(member, StageSpan::one(Stage(0)));
    let since = number.saturating_sub(1);
    let here = vec![record.into()];
    LogRecord::View(ViewChange { since, number, here, ..ViewChange::default() })
}

/// A record of about this many bytes; only the last of them stays in a history.
fn large(number: u64, bytes: usize) -> LogRecord {
    let name = format!("{number}{}", "x".repeat(bytes));
    let file = StoredFile { name, hash: ContentHash([0; 32]), size: Bytes(1) };
    let stages = vec![StoredStage { holders: Vec::new(), files: vec![file] }];
    LogRecord::Checkpoint { version: Step(0), stages, oldest: Step(0) }
}

/// The history that these records make.
fn made_of(records: &[LogRecord]) -> History {
    let mut history = History::default();
    for record in records {
        history.apply(record).expect("in order");
    }
    history
}

async fn soon<T>(what: &str, wait: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LONG, wait).await {
        Ok(done) => done,
        Err(_) => panic!("timed out: {what}"),
    }
}

/// Polls a condition that no event reports.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    soon(what, async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Everything that an anchor reported to its owner.
#[derive(Debug, Default)]
struct Reported {
    term_led: Option<Term>,
    terms: Vec<(Term, History)>,
    proof: Option<TermProof>,
    appended: Vec<LogRecord>,
    deposed: usize,
    leader: Option<(Option<PeerId>, usize, usize)>,
    failed: Option<AnchorError>,
}

impl Reported {
    fn record_event(&mut self, event: AnchorEvent) {
        match event {
            AnchorEvent::Leads { term, history, proof } => {
                let history = *history;
                assert_eq!(proof.vote.term, Founding::term_of(history.number, term.0));
                self.proof = Some(*proof);
                assert_eq!(self.term_led, None, "it leads already");
                assert!(self.terms.last().is_none_or(|(last, _)| *last < term));
                self.term_led = Some(term);
                self.terms.push((term, history));
            }
            AnchorEvent::Confirmed(proof) => self.proof = Some(proof),
            AnchorEvent::Appended(record) => {
                assert!(self.term_led.is_some(), "it does not lead");
                self.appended.push(record);
            }
            AnchorEvent::Deposed => {
                assert!(self.term_led.take().is_some(), "it does not lead");
                self.deposed += 1;
            }
            AnchorEvent::Leader { peer, answering, voters } => {
                assert!(answering <= voters);
                self.leader = Some((peer, answering, voters));
            }
            AnchorEvent::Failed(error) => self.failed = Some(error),
        }
    }
}

fn config_of(peer: PeerId, folder: &Path) -> AnchorConfig {
    let (folder, removed) = (folder.to_owned(), BTreeSet::new());
    let voucher = Voucher { run: run(), keys: Arc::new(HashKeys(peer)), founding: None };
    AnchorConfig { folder, me: peer, first: Step(0), timing: quick(), voucher, removed }
}

/// One anchor and its owner.
struct Node {
    peer: PeerId,
    anchor: Arc<Anchor>,
    reported: watch::Receiver<Reported>,
    net: Arc<Net>,
    owner: TaskTracker,
}

impl Node {
    async fn open(net: &Arc<Net>, peer: PeerId, folder: &Path, found: bool) -> Self {
        Self::open_with(net, config_of(peer, folder), found).await.expect("opened")
    }

    async fn open_with(
        net: &Arc<Net>,
        config: AnchorConfig,
        found: bool,
    ) -> Result<Self, AnchorError> {
        let peer = config.me;
        let links = Arc::new(End { net: Arc::clone(net), me: peer });
        let (anchor, mut events) = Anchor::open(config, found, links).await?;
        let anchor = Arc::new(anchor);
        net.anchors.lock().expect("valid").insert(peer, Arc::clone(&anchor));
        let (sender, reported) = watch::channel(Reported::default());
        let owner = TaskTracker::new();
        owner.spawn(async move {
            while let Some(event) = events.recv().await {
                sender.send_modify(|reported| reported.record_event(event));
            }
        });
        owner.close();
        Ok(Self { peer, anchor, reported, net: Arc::clone(net), owner })
    }

    /// Ends it; its files can be opened again afterwards.
    async fn close(self) {
        self.net.anchors.lock().expect("valid").remove(&self.peer);
        soon("the anchor ends", async {
            // A message may be in delivery.
            let mut shared = self.anchor;
            let anchor = loop {
                match Arc::try_unwrap(shared) {
                    Ok(anchor) => break anchor,
                    Err(again) => shared = again,
                }
                tokio::task::yield_now().await;
            };
            anchor.close().await;
            self.owner.wait().await;
        })
        .await;
    }

    async fn reported(&mut self, what: &str, is_so: impl FnMut(&Reported) -> bool) {
        drop(soon(what, self.reported.wait_for(is_so)).await.expect("every event is reported"));
    }

    /// The term that it leads in, once it leads.
    async fn leads(&mut self) -> Term {
        self.reported("it leads", |reported| reported.term_led.is_some()).await;
        self.term_led().expect("it just became the leader")
    }

    fn term_led(&self) -> Option<Term> {
        self.reported.borrow().term_led
    }

    /// Appends a record in the current term and waits until it is committed.
    async fn append(&mut self, record: LogRecord) {
        let term = self.leads().await;
        let before = self.reported.borrow().appended.len();
        self.anchor.append(term, record);
        self.reported("it is appended", |reported| reported.appended.len() > before).await;
    }

    fn view(&self) -> u64 {
        self.anchor.history().view.number
    }
}

/// Anchors that replicate one log, and the folders of all of them.
struct Group {
    net: Arc<Net>,
    folders: TempDir,
    nodes: BTreeMap<PeerId, Node>,
}

impl Group {
    async fn new(count: u8) -> Self {
        let (net, folders) = (Arc::<Net>::default(), tempfile::tempdir().expect("a folder"));
        let mut group = Self { net, folders, nodes: BTreeMap::new() };
        for number in 1..=count {
            group.open(peer(number), number == 1).await;
        }
        let voters: BTreeSet<PeerId> = group.nodes.keys().copied().collect();
        group.node(peer(1)).leads().await;
        group.vote(peer(1), &voters).await;
        group
    }

    async fn open(&mut self, peer: PeerId, found: bool) {
        let folder = self.folders.path().join(peer.short());
        let node = Node::open(&self.net, peer, &folder, found).await;
        self.nodes.insert(peer, node);
    }

    fn node(&mut self, peer: PeerId) -> &mut Node {
        self.nodes.get_mut(&peer).expect("it is open")
    }

    /// Lets the leader change the voters, and waits until all of them know.
    async fn vote(&mut self, leader: PeerId, voters: &BTreeSet<PeerId>) {
        self.node(leader).anchor.set_voters(voters.clone());
        let nodes = &self.nodes;
        until("the voters are changed", || {
            voters.iter().all(|voter| {
                let anchor = &nodes[voter].anchor;
                let groups = anchor.inner.membership(|now| now.get_joint_config().len());
                anchor.voters() == *voters && groups == 1
            })
        })
        .await;
    }

    /// Ends one anchor without warning.
    async fn kill(&mut self, peer: PeerId) {
        self.nodes.remove(&peer).expect("it is open").close().await;
    }

    /// Waits for a leader other than these.
    async fn leader(&mut self, but: &[PeerId]) -> PeerId {
        let mut leader = None;
        let nodes = &self.nodes;
        until("an anchor leads", || {
            let mut able = nodes.iter().filter(|(peer, _)| !but.contains(peer));
            leader = able.find(|(_, node)| node.term_led().is_some()).map(|(peer, _)| *peer);
            leader.is_some()
        })
        .await;
        leader.expect("it was just found")
    }

    /// Waits until all histories are equal, and returns one.
    async fn agreed(&self, view: u64) -> History {
        until("all histories are equal", || {
            let mut histories = self.nodes.values().map(|node| node.anchor.history());
            let first = histories.next().expect("one anchor is open");
            first.view.number >= view && histories.all(|other| other == first)
        })
        .await;
        self.nodes.values().next().expect("one anchor is open").anchor.history()
    }

    fn peers(&self) -> Vec<PeerId> {
        self.nodes.keys().copied().collect()
    }
}

/// A copy of a folder as a crash at this moment would leave it.
fn copied(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    // The log first: a snapshot that is written in between may be newer than it.
    for name in ["log", "snapshot"] {
        let (from, to) = (folder.join(name), copy.path().join(name));
        if from.exists() {
            std::fs::copy(from, to).expect("copied");
        }
    }
    copy
}
