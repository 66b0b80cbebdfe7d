//! Arguments of `fulmar token`.

use clap::{Args, Subcommand};

use super::ServerArgs;

const TOKEN_EXAMPLES: &str = "\
Examples:
  token=$(fulmar token create prometheus) && echo \"$token\" > /etc/prometheus/fulmar-token
  fulmar token create shop-metrics --tenant shop --expires 90d
  fulmar token create anna --admin --expires 12h
  fulmar token list
  fulmar token drop shop-metrics

The secret is shown only when the token is created. To send it:
  curl -H \"Authorization: Bearer $(cat /etc/prometheus/fulmar-token)\" http://127.0.0.1:8080/metrics";

/// `fulmar token`
#[derive(Args, Debug)]
#[command(after_help = TOKEN_EXAMPLES)]
pub struct TokenArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: TokenAction,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// A subcommand of `fulmar token`.
#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Create a token and print its secret
    Create {
        /// Name of the token
        name: String,
        /// Restrict the token to the metrics of this tenant [default: the whole node]
        #[arg(long, alias = "database", value_name = "TENANT")]
        tenant: Option<String>,
        /// Create a token for the console, which administers like a superuser
        #[arg(long, conflicts_with = "tenant")]
        admin: bool,
        /// Lifetime, such as 12h or 90d [default: unlimited]
        #[arg(long, value_name = "TIME")]
        expires: Option<String>,
    },
    /// Drop tokens. They are rejected from now on
    Drop {
        /// Names of the tokens
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// List all tokens, without their secrets
    List,
}
