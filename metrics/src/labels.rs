//! The labels whose values are known beforehand.

/// A label with all of its values.
pub trait Label: Copy + Eq + Sized + 'static {
    /// Its name in the exposition.
    const NAME: &'static str;
    /// Every value, each once.
    const ALL: &'static [Self];
    /// Its value in the exposition.
    fn value(self) -> &'static str;
}

/// An enum whose values are those of a label: the label's name, then each value with its text.
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
    /// What bytes on the network are for.
    pub enum TrafficKind = "kind" {
        /// Control messages.
        Control = "control",
        /// Activations, gradients and pieces of rounds.
        Tensor = "tensor",
        /// Files.
        File = "file",
        /// Packets passed on between peers that have no way to each other.
        Relay = "relay",
    }
}

label! {
    /// How bad something is that a peer logged.
    pub enum Severity = "level" {
        /// Worth a look.
        Warning = "warn",
        /// Something failed.
        Error = "error",
    }
}

label! {
    /// How a peer's own port stands to those whom it never sent to.
    pub enum PortState = "state" {
        /// Nobody elsewhere was asked.
        Unknown = "unknown",
        /// They get through.
        Open = "open",
        /// A firewall keeps them out.
        Firewall = "firewall",
        /// A router does.
        Router = "router",
        /// A router does that shows every peer another port.
        SymmetricRouter = "symmetric_router",
    }
}

label! {
    /// How a connection leads to a peer.
    pub enum Path = "path" {
        /// Straight there.
        Direct = "direct",
        /// Through another peer.
        Relayed = "relayed",
    }
}

label! {
    /// How a tensor was packed for its link.
    pub enum LinkPacking = "packing" {
        /// Not at all.
        None = "none",
        /// By zstd, without loss.
        Zstd = "zstd",
        /// Integers without the bytes that only repeat their sign.
        Integers = "integers",
    }
}

label! {
    /// Why something that a peer sent was not used.
    pub enum Refusal = "reason" {
        /// It makes no sense: no correct peer sends it.
        Malformed = "malformed",
        /// It is from or to a life that is over.
        OtherLife = "other_life",
        /// It is from before or after a rewind of the run.
        OtherEra = "other_era",
        /// It is from a coordinator whose term is over.
        PastTerm = "past_term",
        /// It is for, or from, a coordinator that is none.
        NoCoordinator = "no_coordinator",
        /// It is about a claim that its sender does not hold.
        Claim = "claim",
        /// It is a file whose bytes have another hash than was asked for.
        File = "file",
        /// It is a checkpoint, or a part of one, that is another run's or damaged.
        Checkpoint = "checkpoint",
    }
}

label! {
    /// Why a connection was refused before anything was said on it.
    pub enum RefusedConnection = "reason" {
        /// It showed no permit, or is not on the list.
        NoCertificate = "no_certificate",
        /// Its ticket or permit has expired.
        Expired = "expired",
        /// Its ticket or permit is from the future.
        Clock = "clock",
        /// All uses of its ticket are used up.
        UsedUp = "used_up",
        /// Its ticket was revoked.
        Revoked = "revoked",
        /// It is banned.
        Banned = "banned",
        /// It showed another peer's permit.
        OtherPeer = "other_peer",
        /// What it showed is not signed by the run's warden.
        Forged = "forged",
        /// It belongs to another run.
        OtherRun = "other_run",
        /// It speaks another protocol version.
        Version = "version",
        /// Its first words make no sense.
        Malformed = "malformed",
        /// It took too long to say who it is.
        Slow = "slow",
        /// More connections were being made than are looked at.
        Flood = "flood",
        /// It is a life that is over, or there is no room.
        Other = "other",
    }
}

label! {
    /// A queue of a peer.
    pub enum Queue = "queue" {
        /// Microbatches accepted and not yet given back.
        Accepted = "accepted",
        /// Offers that wait for room.
        Offers = "offers",
        /// Tasks given to the engine and not yet done.
        Compute = "compute",
    }
}

label! {
    /// Which way a microbatch goes through a stage.
    pub enum Direction = "direction" {
        /// From its input to its output.
        Forward = "forward",
        /// From its output's gradient to its input's.
        Backward = "backward",
    }
}

label! {
    /// What a peer is doing.
    pub enum NodeState = "state" {
        /// It looks for somebody who keeps the run.
        Searching = "searching",
        /// It takes part in the run and does not serve yet.
        Joining = "joining",
        /// It serves.
        Serving = "serving",
        /// It leaves in order.
        Draining = "draining",
        /// The run is over.
        Finished = "finished",
    }
}

label! {
    /// Whether a member takes part.
    pub enum PeerState = "state" {
        /// Not yet: it fetches the weights.
        Joining = "joining",
        /// It does.
        Serving = "serving",
    }
}

label! {
    /// Why work was done again.
    pub enum Repeat = "reason" {
        /// Who had claimed it was lost.
        Lost = "lost",
        /// Who had claimed it was late and let go of it.
        Late = "late",
        /// The run went back to a checkpoint.
        Rewind = "rewind",
    }
}

label! {
    /// Why a member is to change its stage.
    pub enum MoveCause = "reason" {
        /// Nobody has the other stage's weights any more: it begins again from a checkpoint.
        StageLost = "stage_lost",
        /// Members of the other stage are gone, and it is the slow one since.
        MembersGone = "members_gone",
        /// The other stage gets through less, by what is measured.
        Uneven = "uneven",
        /// Two that are about equally fast change places, each nearer then to those whom it sends to.
        Nearer = "nearer",
        /// It is tried what moves lead to.
        Trial = "trial",
    }
}

label! {
    /// Why an all-reduce came to nothing.
    pub enum RoundFailure = "reason" {
        /// A member that took part was lost, and another did work of the step that had no part in it.
        MemberLost = "member_lost",
        /// It took too long: something got lost on the way.
        Late = "late",
    }
}

label! {
    /// What a peer found that must not be.
    pub enum Fault = "fault" {
        /// Its accumulator does not hold what the run counts on.
        Accumulator = "accumulator",
        /// An all-reduce did not count every microbatch once.
        Proof = "proof",
        /// A commit names another result than the one held here.
        Result = "result",
        /// A member sent what no member would.
        Nonsense = "nonsense",
    }
}

label! {
    /// What the engine works at.
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
        /// The reading of weights.
        Restore = "restore",
    }
}

label! {
    /// What announced that the machine is about to be taken away.
    pub enum Preemption = "source" {
        /// SIGTERM, as supervisors and clouds send it.
        Terminated = "terminated",
        /// SIGINT, as somebody at the keyboard sends it.
        Interrupted = "interrupted",
        /// The file of `--preempt-file`.
        File = "file",
    }
}

label! {
    /// Which way memory goes.
    pub enum Swap = "direction" {
        /// From the disk.
        In = "in",
        /// To the disk.
        Out = "out",
    }
}
