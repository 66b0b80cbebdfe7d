//! Arguments of `fulmar node`.

use clap::{Args, Subcommand};

use super::ServerArgs;

const NODE_EXAMPLES: &str = "\
Examples:
  fulmar node list --server postgres://fulmar@127.0.0.1:5433
  fulmar node drain n2                 before maintenance; stopping the node does the same
  fulmar move shop --to n2
  fulmar node forget n3                a node that does not come back

In SQL, in the database `fulmar`:
  SELECT * FROM fulmar.nodes;
  SELECT * FROM fulmar.partitions;
  ALTER DATABASE shop MOVE TO 'n2';";

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
    /// Remove a node that does not come back. Its name can be used again, with an empty data directory
    Forget {
        /// Name of the node
        name: String,
    },
}
