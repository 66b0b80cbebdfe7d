//! The flags of `fulmar start` for a node of a cluster.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use fulmar_elastic::provisioner::ProvisionerUrl;

use crate::size::Bytes;

use super::{MetaSecurityArgs, RpcTlsArgs};

/// The name of the cluster in etcd if `--meta` names none.
const DEFAULT_CLUSTER: &str = "fulmar";

/// The flags of a node of a cluster. All of them, or none.
#[derive(Args, Clone, Debug)]
pub struct ClusterArgs {
    /// Run as the node NAME of the cluster in --meta. The first node creates the cluster. Needs
    /// --rpc, and --meta or --join. Without --store, the node keeps its databases in its data directory
    #[arg(long, value_name = "NAME", requires_all = ["rpc", "metadata"])]
    #[arg(conflicts_with = "read_only", group = "role")]
    pub node: Option<String>,
    /// Listen address for other nodes, which must reach this node at it
    #[arg(long, value_name = "ADDR:PORT", requires = "node")]
    pub rpc: Option<SocketAddr>,
    /// Metadata store of the cluster: etcd://HOST:PORT,HOST:PORT, with /NAME at the end if several
    /// clusters share one etcd; or `embedded` in this node, which the others name in --join
    #[arg(long, value_name = "URL", requires = "role", group = "metadata")]
    pub meta: Option<MetaUrl>,
    /// Join the cluster whose metadata store is embedded in the node at this --rpc address. With TLS,
    /// its name is required: NAME@ADDR:PORT
    #[arg(long, value_name = "ADDR:PORT", requires = "node", group = "metadata")]
    pub join: Option<Join>,
    /// Without --store: keep the pages of databases that were moved to other nodes, up to this size, so
    /// that they move back faster [default: 0]
    #[arg(long, value_name = "BYTES", requires = "node", conflicts_with = "store")]
    pub archives: Option<Bytes>,
    /// Site of this node, such as a data centre. The controller prefers moves within a site
    #[arg(long, value_name = "NAME", requires = "node")]
    pub site: Option<String>,
    /// Rack of this node within its site
    #[arg(long, value_name = "NAME", requires = "site")]
    pub rack: Option<String>,
    /// How the controller adds and removes nodes: `command:PROGRAM` runs an operator's program;
    /// `processes:DIR:FROM-TO` starts processes on this machine, with data in DIR and ports of this range
    ///
    /// PROGRAM is called as `PROGRAM add NAME`, `PROGRAM remove NAME` and `PROGRAM list`, and repeated after a
    /// failure. It reads `{"node": NAME, "cluster": ID, "arguments": [...]}` from standard input: the arguments
    /// of `fulmar start`, without those that each node has of its own (name, addresses, directory, certificate,
    /// site and rack). `list` prints `{"nodes": [NAME, ...]}`. Exit code 0 is success; a new node may begin to
    /// serve later.
    #[arg(long, value_name = "HOW", requires = "node")]
    pub provisioner: Option<ProvisionerUrl>,
    /// TLS between nodes.
    #[command(flatten)]
    pub rpc_tls: RpcTlsArgs,
    /// TLS and the user for etcd.
    #[command(flatten)]
    pub meta_security: MetaSecurityArgs,
}

/// The URL of a metadata store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetaUrl {
    /// In the node's data directory.
    Embedded,
    /// etcd.
    Etcd {
        /// The members, as HOST:PORT.
        endpoints: Vec<String>,
        /// The name of the cluster in etcd.
        cluster: String,
    },
}

impl FromStr for MetaUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "embedded" {
            return Ok(MetaUrl::Embedded);
        }
        let example = "use embedded, or etcd://HOST:PORT,HOST:PORT";
        let rest =
            text.strip_prefix("etcd://").ok_or_else(|| format!("unknown metadata store; {example}"))?;
        let (members, cluster) = match rest.split_once('/') {
            Some((members, cluster)) if !cluster.is_empty() => (members, cluster),
            Some((members, _)) => (members, DEFAULT_CLUSTER),
            None => (rest, DEFAULT_CLUSTER),
        };
        let endpoints: Vec<String> = members.split(',').map(str::to_owned).collect();
        let has_port = |member: &String| {
            member
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        match endpoints.iter().find(|member| !has_port(member)) {
            Some(member) => Err(format!("\"{member}\" is not HOST:PORT; {example}")),
            None => Ok(MetaUrl::Etcd { endpoints, cluster: cluster.to_owned() }),
        }
    }
}

impl fmt::Display for MetaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetaUrl::Embedded => f.write_str("embedded"),
            MetaUrl::Etcd { endpoints, cluster } => write!(f, "etcd://{}/{cluster}", endpoints.join(",")),
        }
    }
}

/// The node with the embedded metadata store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// Its name, if it is given.
    pub name: Option<String>,
    /// Where it listens for other nodes.
    pub address: SocketAddr,
}

impl FromStr for Join {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = match text.split_once('@') {
            Some((name, address)) => (Some(name.to_owned()), address),
            None => (None, text),
        };
        let invalid = |_| "use ADDR:PORT or NAME@ADDR:PORT, the --rpc address of the first node".to_owned();
        Ok(Join { name, address: address.parse().map_err(invalid)? })
    }
}

const CONVERT_EXAMPLES: &str = "\
Stop all nodes of the cluster, and run this with the data directory of the first one:
  fulmar cluster convert --data /var/lib/fulmar --to etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379

Then start all nodes with that --meta instead of --meta embedded and --join. If the command is
interrupted, run it again.";

/// `fulmar cluster`
#[derive(Args, Debug)]
pub struct ClusterCommandArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: ClusterAction,
}

/// A subcommand of `fulmar cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterAction {
    /// Move the embedded metadata store of a stopped cluster to etcd
    #[command(after_help = CONVERT_EXAMPLES)]
    Convert(Box<ConvertArgs>),
}

/// `fulmar cluster convert`
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Data directory of the node with the embedded metadata store
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// The new metadata store: etcd://HOST:PORT,HOST:PORT, with /NAME at the end if several clusters
    /// share one etcd
    #[arg(long = "to", value_name = "URL", id = "meta")]
    pub to: MetaUrl,
    /// TLS and the user for etcd.
    #[command(flatten)]
    pub meta_security: MetaSecurityArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_urls_name_members_and_a_cluster() {
        let url: MetaUrl = "etcd://a:1,[::1]:2/shops".parse().unwrap();
        let endpoints = vec!["a:1".to_owned(), "[::1]:2".to_owned()];
        assert_eq!(url, MetaUrl::Etcd { endpoints, cluster: "shops".to_owned() });
        let url: MetaUrl = "etcd://a:1".parse().unwrap();
        assert_eq!(url.to_string(), "etcd://a:1/fulmar");
        assert_eq!("embedded".parse(), Ok(MetaUrl::Embedded));
        let join: Join = "n1@10.0.0.1:7".parse().unwrap();
        assert_eq!((join.name.as_deref(), join.address.port()), (Some("n1"), 7));
        assert!("n1".parse::<Join>().is_err());
        for (text, part) in [
            ("http://a:1", "unknown metadata store"),
            ("etcd://a", "\"a\" is not HOST:PORT"),
            ("etcd://a:1,", "is not HOST:PORT"),
            ("etcd://:1", "is not HOST:PORT"),
        ] {
            let error = text.parse::<MetaUrl>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
