//! Arguments of `fulmar cert`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

const CERT_EXAMPLES: &str = "\
Examples:
  fulmar cert authority --out /secure/ca                   once per cluster
  fulmar cert node n1 --ca /secure/ca --out /etc/fulmar    for each node
  fulmar start --node n1 --rpc-ca ca.crt --rpc-cert n1.crt --rpc-key n1.key ...

Each node needs ca.crt, its certificate and its key. ca.key issues certificates for any node: keep it
offline. To renew a certificate, issue it into another directory and replace the node's files, which
the node then reloads.";

/// `fulmar cert`
#[derive(Args, Debug)]
#[command(after_help = CERT_EXAMPLES)]
pub struct CertArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: CertAction,
}

/// A subcommand of `fulmar cert`.
#[derive(Debug, Subcommand)]
pub enum CertAction {
    /// Create the authority of a cluster: ca.crt and ca.key
    Authority {
        /// Directory for the files. Created if missing; files are not overwritten
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Days until the certificate expires, and all that it has issued
        #[arg(long, value_name = "N", default_value_t = 3650, value_parser = days())]
        days: u32,
    },
    /// Issue the certificate of a node: NAME.crt and NAME.key
    Node {
        /// Name of the node, as in `fulmar start --node NAME`
        name: String,
        /// Directory with ca.crt and ca.key
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// Directory for the files. Created if missing; files are not overwritten
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Host name or IP address to include, for clients that use the certificate with sslmode
        /// verify-full. May be repeated
        #[arg(long = "address", value_name = "HOST")]
        addresses: Vec<String>,
        /// Days until the certificate expires
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = days())]
        days: u32,
    },
}

/// A century at most.
fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}
