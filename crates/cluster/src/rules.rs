//! The rules of the protocol, each of which a simulation can switch off.
//!
//! `docs/architecture/ownership.md` states the rules. The server runs with [`Rules::ALL`]. A test
//! switches one off and requires that the simulator then finds a violation. This shows that the
//! rule is needed, and that the simulator would detect code that breaks it.

/// Which rules are in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// A node that starts ends its previous incarnation and seals that incarnation's log before it
    /// commits anything.
    pub seal_own_log: bool,
    /// A change of owner compares the states of both nodes.
    pub compare_nodes: bool,
    /// A failover assigns partitions only after the log of the dead incarnation is sealed.
    pub seal_before_assigning: bool,
    /// An owner writes `release` to its log, and accepts nothing more, before it hands over.
    pub release: bool,
    /// An owner resolves a compare-and-set of unknown outcome by another one, never by a read.
    pub settle_by_writing: bool,
    /// An owner answers reads only under its lease.
    pub lease: bool,
    /// A new owner answers nothing until the lease of an ended incarnation has run out.
    pub wait_out_lease: bool,
    /// A gateway asks for the outcome of a commit whose answer was lost before it repeats it.
    pub ask_outcome: bool,
    /// An owner that has answered *not committed* refuses that transaction from then on.
    pub refuse_asked: bool,
    /// A node deletes no log object that a closed range still needs.
    pub keep_closed_ranges: bool,
    /// A log object that is missing within a range is an error, not the end of the log.
    pub no_gaps: bool,
    /// Recovery uses a manifest only if a range names its epoch and node.
    pub named_manifests: bool,
    /// A manifest covers only the durable prefix of the log.
    pub durable_manifests: bool,
    /// A slot of the log is created only if it is absent.
    pub create_if_absent: bool,
    /// A commit is acknowledged only when all slots up to its own are durable.
    pub contiguous: bool,
    /// Sealing begins with a barrier ahead of the writer.
    pub barrier: bool,
}

impl Rules {
    /// All rules, as in the server.
    pub const ALL: Rules = Rules {
        seal_own_log: true,
        compare_nodes: true,
        seal_before_assigning: true,
        release: true,
        settle_by_writing: true,
        lease: true,
        wait_out_lease: true,
        ask_outcome: true,
        refuse_asked: true,
        keep_closed_ranges: true,
        no_gaps: true,
        named_manifests: true,
        durable_manifests: true,
        create_if_absent: true,
        contiguous: true,
        barrier: true,
    };
}
