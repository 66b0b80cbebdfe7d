//! The picture of a cluster: the input of every planner and policy.
//!
//! A picture lists nodes and partitions. A partition has one owner and may have *pieces* that can
//! be placed one by one: hot root keys and blocks of cold root keys (E-Store 3.2). What a partition
//! has beyond its pieces, its *rest*, moves as a whole.
//!
//! Pictures are JSON files. [`Picture::from_json`] reads one and checks it; its errors name the
//! entry and the rule that it breaks. The fields that a file may omit have a default.
//!
//! ```json
//! {"at_s": 0,
//!  "nodes": [{"name": "n1", "capacity": 8, "memory": 17179869184, "site": "eu", "rack": "r1"}],
//!  "partitions": [{"name": "shop", "owner": "n1", "load": 2.5, "bytes": 1000000, "memory": 500000,
//!                  "hot_keys": [{"name": "42", "load": 1.5, "bytes": 200}]}]}
//! ```

mod validate;

use serde::{Deserialize, Serialize};

pub use validate::PictureError;

/// A cluster at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Picture {
    /// The time of the picture, in seconds on any one clock. Cool-downs are measured against it.
    #[serde(default)]
    pub at_s: f64,
    /// The nodes. Their order is the order of E-Store's first fit.
    pub nodes: Vec<Node>,
    /// The partitions of all tenants.
    pub partitions: Vec<Partition>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its unique name.
    pub name: String,
    /// What it can serve, in CPUs.
    pub capacity: f64,
    /// Memory for tenants, in bytes.
    #[serde(default = "unlimited")]
    pub memory: u64,
    /// Its site. Moves between sites are slow (ShuttleDB's WAN).
    #[serde(default)]
    pub site: String,
    /// Its rack within the site.
    #[serde(default)]
    pub rack: String,
    /// Whether it serves, and for how long.
    #[serde(default)]
    pub state: NodeState,
    /// An operator has forbidden moves to this node. What it has stays.
    #[serde(default)]
    pub forbidden: bool,
    /// Nothing is moved to it for now: it is slow, or its load is not known.
    #[serde(default)]
    pub unsuitable: bool,
    /// It has been much slower than the others for long enough to be replaced.
    #[serde(default)]
    pub slow: bool,
    /// It is not removed to save nodes: no provisioner has added it.
    #[serde(default)]
    pub fixed: bool,
}

/// The state of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// Serves, and accepts moves.
    #[default]
    Active,
    /// Is starting: it accepts no moves yet, but counts as capacity that is on its way.
    Joining,
    /// Serves, and has to be emptied.
    Draining,
    /// Does not serve, but may come back soon. It is no capacity, but counts for the minimum of nodes.
    Missing,
    /// Does not serve. Its items have to be placed elsewhere.
    Dead,
}

impl NodeState {
    /// Returns true if everything on the node has to be moved away.
    pub fn is_leaving(self) -> bool {
        matches!(self, NodeState::Draining | NodeState::Dead)
    }
}

/// A partition of a tenant, or a whole tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// Its unique name: the tenant's, or one that the operator can find.
    pub name: String,
    /// The name of the node that owns it.
    pub owner: String,
    /// Its load including its pieces', in CPUs.
    pub load: f64,
    /// What a move copies including its pieces, in bytes.
    #[serde(default)]
    pub bytes: u64,
    /// The memory that it needs including its pieces', in bytes.
    #[serde(default)]
    pub memory: u64,
    /// Smoothed latency of its statements, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<f64>,
    /// The latency that the tenant was promised, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective_ms: Option<f64>,
    /// An operator has pinned it to its node: it is never moved.
    #[serde(default)]
    pub pinned: bool,
    /// When it was last moved, in seconds on the clock of [`Picture::at_s`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_at_s: Option<f64>,
    /// Hot root keys, which are placed one by one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hot_keys: Vec<Piece>,
    /// Blocks of cold root keys, which are placed block by block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Piece>,
}

/// A hot key or a block of cold keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Its name, unique within the partition and kind: the key, or the first key of the block.
    pub name: String,
    /// Its load in CPUs.
    pub load: f64,
    /// Its size in bytes.
    #[serde(default)]
    pub bytes: u64,
    /// The memory that it needs, in bytes.
    #[serde(default)]
    pub memory: u64,
    /// The node that has it, if that is not the partition's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Of a hot key: the block that it was extracted from. One-tier placement keeps it there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<String>,
}

fn unlimited() -> u64 {
    u64::MAX
}

impl Picture {
    /// Reads a picture from JSON, and checks it.
    pub fn from_json(text: &str) -> Result<Picture, PictureError> {
        let picture: Picture = serde_json::from_str(text)?;
        picture.validate()?;
        Ok(picture)
    }

    /// The load of all partitions, in CPUs.
    pub fn load(&self) -> f64 {
        self.partitions.iter().map(|partition| partition.load).sum()
    }
}

impl Partition {
    /// A partition without pieces, and without the optional properties.
    pub fn new(name: impl Into<String>, owner: impl Into<String>, load: f64) -> Partition {
        Partition {
            name: name.into(),
            owner: owner.into(),
            load,
            bytes: 0,
            memory: 0,
            latency_ms: None,
            objective_ms: None,
            pinned: false,
            moved_at_s: None,
            hot_keys: Vec::new(),
            blocks: Vec::new(),
        }
    }

    /// All pieces: hot keys, then blocks.
    pub fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.hot_keys.iter().chain(&self.blocks)
    }
}

impl Piece {
    /// A piece at its partition's owner.
    pub fn new(name: impl Into<String>, load: f64, bytes: u64) -> Piece {
        Piece { name: name.into(), load, bytes, memory: 0, owner: None, block: None }
    }
}

impl Node {
    /// An active node with unlimited memory.
    pub fn new(name: impl Into<String>, capacity: f64) -> Node {
        Node {
            name: name.into(),
            capacity,
            memory: u64::MAX,
            site: String::new(),
            rack: String::new(),
            state: NodeState::Active,
            forbidden: false,
            unsuitable: false,
            slow: false,
            fixed: false,
        }
    }

    /// Returns true if items may be moved to the node.
    pub fn accepts_moves(&self) -> bool {
        self.state == NodeState::Active && !self.forbidden && !self.unsuitable
    }
}
