//! Which mechanism: ShuttleDB's Table 1 (4, step 4) in Fulmar's words.
//!
//! need | dedicated tenant (large) | shared tenant (small)
//! --- | --- | ---
//! scale up, same site | move the machine | move the tenant
//! scale out, same site | replicate the tenant (or machine) | extract the tenant, then replicate it
//! scale up, another site | move the tenant | move the tenant
//! scale out, another site | replicate the tenant | extract the tenant, then replicate it
//! scale back | drop a replica, or move to a smaller node | move the tenant to a shared node
//!
//! *Dedicated*: the only tenant of its node. *Scale up*: a larger or less loaded node suffices.
//! *Scale out*: no single node can serve the load. Within the site is preferred to another one.
//! *Extract*: the tenant moves to a node of its own first, because replicating a shared machine
//! would copy its neighbours too. The paper merges the cells of scale-out; its text gives the
//! extraction, and replication by the database between sites "due to the premium placed on
//! bandwidth".
//!
//! Some mechanisms do not exist in Fulmar yet ([`Mechanism::exists`]); [`steps`] reports them.

use serde::Serialize;

/// How a tenant uses its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tenancy {
    /// The only tenant of its node.
    Dedicated,
    /// One of several.
    Shared,
}

/// What a tenant needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// More than its node gives it, but no more than one node has.
    ScaleUp,
    /// More than any single node has.
    ScaleOut,
    /// Less than it has.
    ScaleBack,
}

/// The link between the old and the new node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// Within a site.
    Lan,
    /// Between sites.
    Wan,
}

/// A cell of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// The column.
    pub tenancy: Tenancy,
    /// The row.
    pub need: Need,
    /// The row.
    pub link: Link,
}

/// A way to give a tenant more or less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// Move one tenant to another node (the paper's database-level migration).
    MoveTenant,
    /// Move a node's tenants together to a new node (virtual machine migration): `ALTER NODE ...
    /// MOVE TO`. A dedicated tenant is the only one of its node.
    MoveMachine,
    /// Give a tenant a further node that serves its reads (database-level replication).
    ReplicateTenant,
    /// Take a replica away.
    DropReplica,
    /// Move single keys of a large tenant to another node (E-Store). Not in Table 1.
    MoveRows,
}

impl Mechanism {
    /// Returns true if Fulmar has the mechanism.
    pub fn exists(self) -> bool {
        matches!(self, Mechanism::MoveTenant | Mechanism::MoveMachine)
    }
}

/// A step of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Move the tenant to a node of its own.
    Extract,
    /// Use a mechanism.
    Use(Mechanism),
}

use Mechanism::{DropReplica, MoveMachine, MoveTenant, ReplicateTenant};
use Need::{ScaleBack, ScaleOut, ScaleUp};

/// The table: the preferred steps of each cell. Both links have the same row where the paper makes
/// no difference.
#[rustfmt::skip]
pub const TABLE_1: [(Need, Link, &[Step], &[Step]); 6] = [
    // need, link           dedicated tenant (large)        shared tenant (small)
    (ScaleUp,   Link::Lan, &[Step::Use(MoveMachine)],      &[Step::Use(MoveTenant)]),
    (ScaleOut,  Link::Lan, &[Step::Use(ReplicateTenant)],  &[Step::Extract, Step::Use(ReplicateTenant)]),
    (ScaleUp,   Link::Wan, &[Step::Use(MoveTenant)],       &[Step::Use(MoveTenant)]),
    (ScaleOut,  Link::Wan, &[Step::Use(ReplicateTenant)],  &[Step::Extract, Step::Use(ReplicateTenant)]),
    (ScaleBack, Link::Lan, &[Step::Use(DropReplica)],      &[Step::Use(MoveTenant)]),
    (ScaleBack, Link::Wan, &[Step::Use(DropReplica)],      &[Step::Use(MoveTenant)]),
];

/// The steps of a cell.
pub fn table_1(cell: Cell) -> &'static [Step] {
    let row = TABLE_1.iter().find(|(need, link, ..)| (*need, *link) == (cell.need, cell.link));
    match (row, cell.tenancy) {
        (Some((_, _, dedicated, _)), Tenancy::Dedicated) => dedicated,
        (Some((_, _, _, shared)), Tenancy::Shared) => shared,
        (None, _) => &[],
    }
}

/// The steps of a cell that Fulmar can do, and the mechanisms that are missing. Without replication
/// a shared tenant is still extracted.
pub fn steps(cell: Cell) -> (Vec<Step>, Vec<Mechanism>) {
    let (mut steps, mut missing) = (Vec::new(), Vec::new());
    for step in table_1(cell) {
        match step {
            Step::Use(mechanism) if !mechanism.exists() => missing.push(*mechanism),
            step => steps.push(*step),
        }
    }
    (steps, missing)
}
