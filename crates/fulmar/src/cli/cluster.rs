//! The flags of `fulmar start` for a node of a cluster.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use clap::Args;

use super::{MetaSecurityArgs, RpcTlsArgs};

/// The name of the cluster in etcd if `--meta` names none.
const DEFAULT_CLUSTER: &str = "fulmar";

/// The flags of a node of a cluster. All of them, or none.
#[derive(Args, Clone, Debug)]
pub struct ClusterArgs {
    /// Run as the node NAME of the cluster in --meta. The first node creates the cluster. Needs
    /// --rpc, --meta and --store
    #[arg(long, value_name = "NAME", requires_all = ["rpc", "meta", "store"])]
    #[arg(conflicts_with_all = ["read_only", "accept_catalog"])]
    pub node: Option<String>,
    /// Listen address for other nodes, which must reach this node at it
    #[arg(long, value_name = "ADDR:PORT", requires = "node")]
    pub rpc: Option<SocketAddr>,
    /// Metadata store of the cluster: etcd://HOST:PORT,HOST:PORT, with /NAME at the end if several
    /// clusters share one etcd
    #[arg(long, value_name = "URL", requires = "node")]
    pub meta: Option<MetaUrl>,
    /// TLS between nodes.
    #[command(flatten)]
    pub rpc_tls: RpcTlsArgs,
    /// TLS and the user for etcd.
    #[command(flatten)]
    pub meta_security: MetaSecurityArgs,
}

/// The URL of a metadata store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaUrl {
    /// The members of etcd, as HOST:PORT.
    pub endpoints: Vec<String>,
    /// The name of the cluster in etcd.
    pub cluster: String,
}

impl FromStr for MetaUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "use etcd://HOST:PORT,HOST:PORT";
        if text == "embedded" {
            return Err(format!(
                "the nodes of a cluster need a metadata store that all of them can reach; {example}, or \
                 remove --node, --rpc and --meta to run a single node"
            ));
        }
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
            None => Ok(MetaUrl { endpoints, cluster: cluster.to_owned() }),
        }
    }
}

impl fmt::Display for MetaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd://{}/{}", self.endpoints.join(","), self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_urls_name_members_and_a_cluster() {
        let url: MetaUrl = "etcd://a:1,[::1]:2/shops".parse().unwrap();
        assert_eq!(
            (url.endpoints.as_slice(), url.cluster.as_str()),
            (&["a:1".into(), "[::1]:2".into()][..], "shops")
        );
        let url: MetaUrl = "etcd://a:1".parse().unwrap();
        assert_eq!(url.to_string(), "etcd://a:1/fulmar");
        for (text, part) in [
            ("embedded", "run a single node"),
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
