//! Anchors on one machine, with links that can be cut.

mod alone;
mod group;
mod net;
mod storage;
mod strangers;
mod wild;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{ContentHash, Incarnation, Member, PeerId, Stage, StageSpan, Step, Term};
use shoal_protocol::message::{
    AnchorMessage, Duties, LogRecord, MemberRecord, StoredFile, StoredStage, ViewChange,
};
use shoal_protocol::units::Bytes;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use net::{End, Net};

use super::{Anchor, AnchorConfig, AnchorError, AnchorEvent, Links, Timing};

/// Everything that is waited for happens long before.
const LONG: Duration = Duration::from_secs(30);

fn peer(number: u8) -> PeerId {
    PeerId([number; 32])
}

fn quick() -> Timing {
    Timing {
        heartbeat: Duration::from_millis(20),
        election: Duration::from_millis(150)..Duration::from_millis(300),
    }
}

/// A record that leaves a trace of its own in every history that has it: a life of `trace`.
fn record(number: u64, trace: u64) -> LogRecord {
    let mut key = [7; 32];
    key[..8].copy_from_slice(&trace.to_le_bytes());
    let member = Member { peer: PeerId(key), incarnation: Incarnation(1) };
    let record = MemberRecord {
        member,
        span: StageSpan::one(Stage(0)),
        addresses: Vec::new(),
        serving: true,
        duties: Duties::default(),
        mobile: false,
        moves: None,
    };
    let since = number.saturating_sub(1);
    let here = vec![record.into()];
    LogRecord::View(ViewChange { since, number, here, ..ViewChange::default() })
}

/// A record of about this many bytes; only the last of them is in a history.
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
        Err(_) => panic!("it never happens: {what}"),
    }
}

/// Waits for something that no event tells of.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    soon(what, async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// What an anchor's owner was told.
#[derive(Debug, Default)]
struct Told {
    office: Option<Term>,
    offices: Vec<(Term, History)>,
    appended: Vec<LogRecord>,
    deposed: usize,
    leader: Option<(Option<PeerId>, usize, usize)>,
    failed: Option<AnchorError>,
}

impl Told {
    fn hear(&mut self, event: AnchorEvent) {
        match event {
            AnchorEvent::Leads { term, history } => {
                assert_eq!(self.office, None, "it leads already");
                assert!(self.offices.last().is_none_or(|(last, _)| *last < term));
                self.office = Some(term);
                self.offices.push((term, history));
            }
            AnchorEvent::Appended(record) => {
                assert!(self.office.is_some(), "it does not lead");
                self.appended.push(record);
            }
            AnchorEvent::Deposed => {
                assert!(self.office.take().is_some(), "it does not lead");
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

/// One anchor and its owner.
struct Node {
    peer: PeerId,
    anchor: Arc<Anchor>,
    told: watch::Receiver<Told>,
    net: Arc<Net>,
    owner: TaskTracker,
}

impl Node {
    async fn open(net: &Arc<Net>, peer: PeerId, folder: &Path, found: bool) -> Self {
        Self::open_with(net, peer, folder, found, quick()).await.expect("opened")
    }

    async fn open_with(
        net: &Arc<Net>,
        peer: PeerId,
        folder: &Path,
        found: bool,
        timing: Timing,
    ) -> Result<Self, AnchorError> {
        let config = AnchorConfig { folder: folder.to_owned(), me: peer, timing };
        let links = Arc::new(End { net: Arc::clone(net), me: peer });
        let (anchor, mut events) = Anchor::open(config, found, links).await?;
        let anchor = Arc::new(anchor);
        net.ends.lock().expect("sound").insert(peer, Arc::clone(&anchor));
        let (tell, told) = watch::channel(Told::default());
        let owner = TaskTracker::new();
        owner.spawn(async move {
            while let Some(event) = events.recv().await {
                tell.send_modify(|told| told.hear(event));
            }
        });
        owner.close();
        Ok(Self { peer, anchor, told, net: Arc::clone(net), owner })
    }

    /// Ends it; its files can be opened again.
    async fn close(self) {
        self.net.ends.lock().expect("sound").remove(&self.peer);
        soon("the anchor ends", async {
            // A message may just be on its way in.
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

    async fn told(&mut self, what: &str, is_so: impl FnMut(&Told) -> bool) {
        drop(soon(what, self.told.wait_for(is_so)).await.expect("it is told of all"));
    }

    /// The term that it leads in, from now or soon on.
    async fn leads(&mut self) -> Term {
        self.told("it leads", |told| told.office.is_some()).await;
        self.office().expect("it was just told of it")
    }

    fn office(&self) -> Option<Term> {
        self.told.borrow().office
    }

    /// Appends one record in the present term and waits until it is agreed on.
    async fn append(&mut self, record: LogRecord) {
        let term = self.leads().await;
        let before = self.told.borrow().appended.len();
        self.anchor.append(term, record);
        self.told("it is appended", |told| told.appended.len() > before).await;
    }

    fn view(&self) -> u64 {
        self.anchor.history().view.number
    }
}

/// Anchors that keep a log together, and the folders of all of them.
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

    /// Makes these the voters, by the leader, and waits until all of them know.
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

    /// Ends one anchor at once.
    async fn kill(&mut self, peer: PeerId) {
        self.nodes.remove(&peer).expect("it is open").close().await;
    }

    /// Whoever leads, waiting until somebody does; not those.
    async fn leader(&mut self, but: &[PeerId]) -> PeerId {
        let mut leader = None;
        let nodes = &self.nodes;
        until("somebody leads", || {
            let mut able = nodes.iter().filter(|(peer, _)| !but.contains(peer));
            leader = able.find(|(_, node)| node.office().is_some()).map(|(peer, _)| *peer);
            leader.is_some()
        })
        .await;
        leader.expect("it was just found")
    }

    /// Waits until all have the same history, and gives it.
    async fn agreed(&self, view: u64) -> History {
        until("all histories are equal", || {
            let mut histories = self.nodes.values().map(|node| node.anchor.history());
            let first = histories.next().expect("somebody is open");
            first.view.number >= view && histories.all(|other| other == first)
        })
        .await;
        self.nodes.values().next().expect("somebody is open").anchor.history()
    }

    fn peers(&self) -> Vec<PeerId> {
        self.nodes.keys().copied().collect()
    }
}

/// A copy of a folder as a process that dies now would leave it.
fn copied(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    // The log first: a snapshot that is made meanwhile is newer, which it may be.
    for name in ["log", "snapshot"] {
        let (from, to) = (folder.join(name), copy.path().join(name));
        if from.exists() {
            std::fs::copy(from, to).expect("copied");
        }
    }
    copy
}
