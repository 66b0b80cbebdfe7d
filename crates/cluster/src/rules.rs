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
    /// Records are read linearizably, never from a member of the metadata store that may lag.
    pub linearizable_reads: bool,
    /// The wait for another incarnation's lease is longer than the lease, because clocks may run
    /// apart.
    pub lease_margin: bool,
    /// The lease is counted on a clock that continues while the machine is suspended.
    pub boot_time: bool,
    /// An unnamed segment of a living incarnation is deleted only after that incarnation has
    /// promised never to name it.
    pub disown: bool,
    /// An unnamed segment of an ended incarnation is deleted only when no range needs its log.
    pub ended_makers: bool,
    /// The collector lists manifests after it has received the promises.
    pub promise_first: bool,
    /// An incarnation promises nothing about the segments of a manifest that may still be stored.
    pub settle_manifests: bool,
    /// A manifest of an epoch above the record's is an error, not garbage.
    pub refuse_newer_epochs: bool,
    /// Ages of objects are measured by the store's clock.
    pub store_clock: bool,
    /// The collector deletes no object that a living incarnation holds.
    pub holds: bool,
    /// The collector registers what it deletes in the metadata store, one batch after the other.
    pub fence_collector: bool,
    /// An owner accepts nothing between the flush and the transaction that changes the durability.
    pub hold_during_change: bool,
    /// A failover leaves partitions with a local log to their node.
    pub local_stays: bool,
    /// A node starts only with the data directory of its previous incarnation.
    pub match_directory: bool,
    /// The handover of a migration compares the migration's journal.
    pub compare_journal: bool,
    /// A node refuses commands of earlier migrations, and of earlier steps.
    pub refuse_stale_commands: bool,
    /// The owner of a private partition changes only after the destination has stored every page.
    pub copy_before_change: bool,
    /// The source of an on-demand migration keeps its pages until the record no longer names it.
    pub pin_pages: bool,
    /// A transaction that was executing when its owner died is replayed once.
    pub replay_once: bool,
    /// A node does not open a quarantined partition.
    pub quarantine: bool,
    /// Only deaths that the dead process itself recorded count towards a quarantine.
    pub reported_deaths_only: bool,
    /// A death that is reported twice counts once.
    pub count_deaths_once: bool,
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
        linearizable_reads: true,
        lease_margin: true,
        boot_time: true,
        disown: true,
        ended_makers: true,
        promise_first: true,
        settle_manifests: true,
        refuse_newer_epochs: true,
        store_clock: true,
        holds: true,
        fence_collector: true,
        hold_during_change: true,
        local_stays: true,
        match_directory: true,
        compare_journal: true,
        refuse_stale_commands: true,
        copy_before_change: true,
        pin_pages: true,
        replay_once: true,
        quarantine: true,
        reported_deaths_only: true,
        count_deaths_once: true,
    };
}
