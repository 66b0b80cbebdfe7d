//! What can be asked of `fulmar token`.

use clap::{Args, Subcommand};

use super::ServerArgs;

const TOKEN_EXAMPLES: &str = "\
Examples:
  token=$(fulmar token create prometheus) && echo \"$token\" > /etc/prometheus/fulmar-token
  fulmar token create shop-metrics --tenant shop --expires 90d
  fulmar token list
  fulmar token drop shop-metrics

A token is shown once, when it is made. It is sent as in
  curl -H \"Authorization: Bearer $(cat /etc/prometheus/fulmar-token)\" http://127.0.0.1:8080/metrics";

/// `fulmar token`
#[derive(Args, Debug)]
#[command(after_help = TOKEN_EXAMPLES)]
pub struct TokenArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: TokenAction,
    /// The node to ask.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// What to do with tokens.
#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Make a token, and print its secret
    Create {
        /// Its name
        name: String,
        /// It shows this tenant only [default: the whole node]
        #[arg(long, alias = "database", value_name = "TENANT")]
        tenant: Option<String>,
        /// How long it lasts, with its unit: 12h, 90d [default: for ever]
        #[arg(long, value_name = "TIME")]
        expires: Option<String>,
    },
    /// Drop tokens: they are worth nothing from now on
    Drop {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show all tokens, without their secrets
    List,
}
