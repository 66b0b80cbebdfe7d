//! Arguments of `fulmar node`.

use clap::{Args, Subcommand};

use super::{MoveMechanism, ServerArgs};
use crate::size::Bytes;

const NODE_EXAMPLES: &str = "\
Examples:
  fulmar node list --server postgres://fulmar@127.0.0.1:5433
  fulmar node drain n2                 before maintenance; stopping the node does the same
  fulmar node move n1 --to n4          all databases, to a new machine; repeat it to move what is left
  fulmar move shop --to n2
  fulmar node forget n3                a node that does not come back

In SQL, in the database `fulmar`:
  SELECT * FROM fulmar.nodes;
  SELECT * FROM fulmar.partitions;
  ALTER DATABASE shop MOVE TO 'n2';
  ALTER NODE n1 MOVE TO 'n4';";

/// `fulmar node`
#[derive(Args, Debug)]
#[command(after_help = NODE_EXAMPLES)]
pub struct NodeArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: NodeAction,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// A subcommand of `fulmar node`.
#[derive(Debug, Subcommand)]
pub enum NodeAction {
    /// List the nodes of the cluster
    List,
    /// Move all databases of a node to the other nodes, while they are in use
    Drain {
        /// Name of the node
        name: String,
    },
    /// Move all databases of a node to one other node, while they are in use, except the system
    /// database
    Move(NodeMoveArgs),
    /// Remove a node that does not come back. Its name can be used again, with an empty data directory
    Forget {
        /// Name of the node
        name: String,
    },
}

/// `fulmar node move`
#[derive(Args, Debug)]
pub struct NodeMoveArgs {
    /// Name of the node that has the databases
    pub name: String,
    /// Name of the node that gets them
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// How to move each database [default: as for fulmar move]
    #[arg(long, value_name = "MECHANISM")]
    pub using: Option<MoveMechanism>,
    /// Maximum number of bytes copied per second, for each database
    #[arg(long, value_name = "SIZE")]
    pub max_rate: Option<Bytes>,
}
