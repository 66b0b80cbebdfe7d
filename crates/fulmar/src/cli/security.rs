//! Arguments of `fulmar start` that secure a node's connections to other nodes and to etcd.

use std::path::PathBuf;

use clap::Args;

/// TLS between nodes.
#[derive(Args, Clone, Debug, Default)]
pub struct RpcTlsArgs {
    /// Certificate of the cluster's authority (PEM). Enables TLS between nodes: see `fulmar cert`.
    /// Reloaded like --tls-cert, as are --rpc-cert and --rpc-key
    #[arg(long, value_name = "FILE", requires_all = ["rpc", "rpc_cert", "rpc_key"])]
    pub rpc_ca: Option<PathBuf>,
    /// Certificate chain (PEM) of this node, issued by --rpc-ca for the name --node
    #[arg(long, value_name = "FILE", requires = "rpc_ca")]
    pub rpc_cert: Option<PathBuf>,
    /// Private key of --rpc-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "rpc_ca")]
    pub rpc_key: Option<PathBuf>,
}

/// TLS and authentication of connections to etcd.
#[derive(Args, Clone, Debug, Default)]
pub struct MetaSecurityArgs {
    /// Certificate of the authority of etcd's members (PEM). Enables TLS for --meta
    #[arg(long, value_name = "FILE", requires = "meta")]
    pub meta_ca: Option<PathBuf>,
    /// Certificate (PEM) of this node for etcd, if etcd requires one
    #[arg(long, value_name = "FILE", requires_all = ["meta_ca", "meta_key"])]
    pub meta_cert: Option<PathBuf>,
    /// Private key of --meta-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "meta_cert")]
    pub meta_key: Option<PathBuf>,
    /// User of etcd
    #[arg(long, value_name = "NAME", requires_all = ["meta", "meta_password_file"])]
    pub meta_user: Option<String>,
    /// File that contains the password of --meta-user
    #[arg(long, value_name = "FILE", requires = "meta_user")]
    pub meta_password_file: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};

    #[test]
    fn files_are_required_together_and_only_for_clusters() {
        let cluster = "--node n1 --rpc 127.0.0.1:3 --meta etcd://h:1 --store file:///s";
        let rpc = "--rpc-ca c --rpc-cert c --rpc-key k";
        let parse = |flags: &str| {
            let line = format!("fulmar start --data d --sql 127.0.0.1:1 --http 127.0.0.1:2 {flags}");
            match Cli::try_parse_from(line.split_whitespace())?.command {
                Command::Start(start) => Ok::<_, clap::Error>(start.cluster),
                _ => panic!("parsed as another subcommand than start"),
            }
        };
        let meta = "--meta-ca c --meta-cert c --meta-key k --meta-user u --meta-password-file p";
        let parsed = parse(&format!("{cluster} {rpc} {meta}")).unwrap();
        assert!(parsed.rpc_tls.rpc_key.is_some() && parsed.meta_security.meta_password_file.is_some());
        parse(&format!("{cluster} --meta-ca c")).unwrap();
        for invalid in [
            rpc,
            "--meta-ca c",
            &format!("{cluster} --rpc-ca c --rpc-cert c"),
            &format!("{cluster} --rpc-cert c --rpc-key k"),
            &format!("{cluster} --meta-cert c --meta-key k"),
            &format!("{cluster} --meta-ca c --meta-cert c"),
            &format!("{cluster} --meta-user u"),
            &format!("{cluster} --meta-password-file p"),
        ] {
            assert!(parse(invalid).is_err(), "accepted: {invalid}");
        }
    }
}
