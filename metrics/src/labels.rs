//! Labels whose values are known at compile time.

/// A label and its values.
pub trait Label: Copy + Eq + Sized + 'static {
    /// Its name in the exposition.
    const NAME: &'static str;
    /// Every value, each once.
    const ALL: &'static [Self];
    /// Its value in the exposition.
    fn value(self) -> &'static str;
}

/// Defines an enum for a label: the label's name, then each value with its text.
macro_rules! label {
    (
        $(#[$attribute:meta])*
        pub enum $label:ident = $name:literal {
            $($(#[$about:meta])* $value:ident = $text:literal,)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $label {
            $($(#[$about])* $value,)+
        }

        impl Label for $label {
            const NAME: &'static str = $name;
            const ALL: &'static [Self] = &[$(Self::$value),+];

            fn value(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}

label! {
    /// The purpose of bytes on the network.
    pub enum TrafficKind = "kind" {
        /// Control messages.
        Control = "control",
        /// Activations, gradients and pieces of rounds.
        Tensor = "tensor",
        /// Files.
        File = "file",
        /// Packets relayed between peers that cannot reach each other.
        Relay = "relay",
    }
}

label! {
    /// What tensors are for.
    pub enum TensorKind = "kind" {
        /// Trained weights, with their copies.
        Weights = "weights",
        /// Weights that are not trained, beside adapters.
        Frozen = "frozen",
        /// What the optimizer keeps.
        Optimizer = "optimizer",
        /// Sums of gradients.
        Sums = "sums",
        /// Copies of weights that are there only while passes read them: the most so far.
        Images = "images",
        /// All that virtual workers have.
        Workers = "workers",
    }
}

label! {
    /// The severity of a log message.
    pub enum Severity = "level" {
        /// A warning.
        Warning = "warn",
        /// An error.
        Error = "error",
    }
}

label! {
    /// Reachability of a peer's own port for unsolicited packets.
    pub enum PortState = "state" {
        /// No other peer has probed it.
        Unknown = "unknown",
        /// Packets arrive.
        Open = "open",
        /// A firewall blocks them.
        Firewall = "firewall",
        /// A router blocks them.
        Router = "router",
        /// A router blocks them that maps the port differently for every peer.
        SymmetricRouter = "symmetric_router",
    }
}

label! {
    /// The path of a connection.
    pub enum Path = "path" {
        /// Directly to the peer.
        Direct = "direct",
        /// Through another peer.
        Relayed = "relayed",
    }
}

label! {
    /// The packing of data for a link.
    pub enum LinkPacking = "packing" {
        /// Without packing.
        None = "none",
        /// Compressed with zstd.
        Zstd = "zstd",
        /// Integers without redundant sign bytes.
        Integers = "integers",
    }
}

label! {
    /// Why a message or data from a peer was rejected.
    pub enum Refusal = "reason" {
        /// Malformed: no correct peer sends it.
        Malformed = "malformed",
        /// From or to another incarnation.
        OtherLife = "other_life",
        /// From another era, before or after a rewind of the run.
        OtherEra = "other_era",
        /// From a coordinator of an earlier term.
        PastTerm = "past_term",
        /// From a peer that is not what the sender of such a message must be.
        Sender = "sender",
        /// About a claim that the sender does not hold.
        Claim = "claim",
        /// A file with a wrong hash.
        File = "file",
        /// A checkpoint, or a part of one, that is damaged or belongs to another run.
        Checkpoint = "checkpoint",
    }
}

label! {
    /// Why a connection was refused before any message.
    pub enum RefusedConnection = "reason" {
        /// The peer has no certificate, or is not on the access list.
        NoCertificate = "no_certificate",
        /// Its ticket or certificate has expired.
        Expired = "expired",
        /// Its ticket or certificate is dated in the future.
        Clock = "clock",
        /// Its ticket has no uses left.
        UsedUp = "used_up",
        /// Its ticket was revoked.
        Revoked = "revoked",
        /// It is banned.
        Banned = "banned",
        /// It presented another peer's certificate.
        OtherPeer = "other_peer",
        /// Its ticket or certificate is not signed by the run's issuer.
        Forged = "forged",
        /// It belongs to another run.
        OtherRun = "other_run",
        /// It speaks another protocol version.
        Version = "version",
        /// Its handshake is malformed.
        Malformed = "malformed",
        /// Its handshake timed out.
        Slow = "slow",
        /// Too many handshakes were in progress.
        Flood = "flood",
        /// Its incarnation has ended, or there is no room.
        Other = "other",
    }
}

label! {
    /// A queue of a peer.
    pub enum Queue = "queue" {
        /// Microbatches accepted and not yet returned.
        Accepted = "accepted",
        /// Offers that wait for room.
        Offers = "offers",
        /// Tasks given to the engine and not finished.
        Compute = "compute",
    }
}

label! {
    /// The direction of a microbatch through a stage.
    pub enum Direction = "direction" {
        /// From its input to its output.
        Forward = "forward",
        /// From its output's gradient to its input's.
        Backward = "backward",
    }
}

label! {
    /// The state of a peer.
    pub enum NodeState = "state" {
        /// It searches for the coordinator.
        Searching = "searching",
        /// It is joining and does not serve yet.
        Joining = "joining",
        /// It serves.
        Serving = "serving",
        /// It is leaving in order.
        Draining = "draining",
        /// The run is over.
        Finished = "finished",
    }
}

label! {
    /// Whether a member serves.
    pub enum PeerState = "state" {
        /// It fetches the weights.
        Joining = "joining",
        /// It serves.
        Serving = "serving",
    }
}

label! {
    /// Why work was repeated.
    pub enum Repeat = "reason" {
        /// The holder of its claim was lost.
        Lost = "lost",
        /// The holder of its claim was overdue and released it.
        Late = "late",
        /// The run returned to a checkpoint.
        Rewind = "rewind",
    }
}

label! {
    /// What an audit of a member's work showed.
    pub enum AuditResult = "result" {
        /// Another replica came to what the member stated.
        Sound = "sound",
        /// No like replica could compute the work again.
        NotAudited = "not_audited",
        /// A peer's work was wrong, and it is out of the run.
        Wrong = "wrong",
    }
}

label! {
    /// Why a member changes its stage.
    pub enum MoveCause = "reason" {
        /// No member has the other stage's weights: it restarts from a checkpoint.
        StageLost = "stage_lost",
        /// The other stage lost members and became the slowest.
        MembersGone = "members_gone",
        /// The other stage has less measured throughput.
        Uneven = "uneven",
        /// Two members exchange stages to be nearer to the peers that they send to.
        Nearer = "nearer",
        /// A longer or shorter span is faster.
        Span = "span",
        /// A trial move, for tests.
        Trial = "trial",
    }
}

label! {
    /// Why an all-reduce failed.
    pub enum RoundFailure = "reason" {
        /// A participant was lost, and a member outside the round had done work of the step.
        MemberLost = "member_lost",
        /// It timed out because data was lost in transit.
        Late = "late",
        /// Its result was not the sum of what its members say that they gave.
        Forged = "forged",
    }
}

label! {
    /// Why the run's guard found a step far out.
    pub enum OutlierReason = "reason" {
        /// Its loss.
        Loss = "loss",
        /// The norm of its gradient.
        GradientNorm = "gradient_norm",
        /// A gradient that is not finite, or beyond the range of the sums.
        NotFinite = "not_finite",
    }
}

label! {
    /// A violated invariant that a peer detected.
    pub enum Fault = "fault" {
        /// Its accumulator does not hold the expected microbatches.
        Accumulator = "accumulator",
        /// An all-reduce did not count every microbatch exactly once.
        Proof = "proof",
        /// A commit names a different result than the one held here.
        Result = "result",
        /// A member sent a message that no correct member sends.
        UnexpectedMessage = "nonsense",
    }
}

label! {
    /// The kind of a task of the engine.
    pub enum Phase = "phase" {
        /// A forward pass.
        Forward = "forward",
        /// A backward pass.
        Backward = "backward",
        /// The addition of a gradient to the accumulator.
        Accumulate = "accumulate",
        /// A piece of an all-reduce.
        Reduce = "reduce",
        /// The optimizer's update.
        Apply = "apply",
        /// Loading weights.
        Restore = "restore",
    }
}

label! {
    /// The source of a request to leave before the machine is stopped.
    pub enum Preemption = "source" {
        /// SIGTERM, from a supervisor or cloud.
        Terminated = "terminated",
        /// SIGINT, from a keyboard.
        Interrupted = "interrupted",
        /// SIGHUP, from a terminal that was closed.
        HungUp = "hung_up",
        /// The file of `--preempt-file`.
        File = "file",
    }
}

label! {
    /// The direction of swapping.
    pub enum Swap = "direction" {
        /// From the disk.
        In = "in",
        /// To the disk.
        Out = "out",
    }
}
