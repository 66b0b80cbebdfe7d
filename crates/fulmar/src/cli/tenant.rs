//! What can be asked of `fulmar tenant`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};

use super::ServerArgs;

const TENANT_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop --owner ada --server postgres://fulmar@127.0.0.1:5433
  fulmar tenant create shop-test --template shop      a copy of shop as it is now
  fulmar tenant history shop                          what shop can be restored to, or branched from
  fulmar tenant create shop-noon --template shop --at '2026-11-21 12:00'
  fulmar tenant restore shop --to '2026-11-21 12:00'
  fulmar tenant rename shop store
  fulmar tenant list --json
  fulmar tenant load shop orders orders.csv --header
  fulmar tenant export shop shop.db                   an SQLite file, consistent, while shop is in use
  fulmar tenant export shop noon.db --at '2026-11-21 12:00'
  fulmar tenant import shop-2 shop.db --owner ada
  fulmar tenant exec --all -f migrate.sql             one transaction in each tenant
  fulmar tenant drop store

The server can be given once: export FULMAR_SERVER=postgres://fulmar@127.0.0.1:5433
The password is taken from --password-file, else from the URL, else from PGPASSWORD.
For TLS: --server 'postgres://fulmar@db.example:5433?sslmode=verify-full&sslrootcert=server.crt'

Every client can do the same in the database `fulmar`: CREATE DATABASE shop WITH OWNER ada;";

/// `fulmar tenant`
#[derive(Args, Debug)]
#[command(after_help = TENANT_EXAMPLES)]
pub struct TenantArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: TenantAction,
    /// The node to ask.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// What to do with tenants.
#[derive(Debug, Subcommand)]
pub enum TenantAction {
    /// Make tenants; clients can connect at once
    Create {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// The user that they belong to [default: the user that asks]
        #[arg(long, value_name = "USER")]
        owner: Option<String>,
        /// Begin with a copy of this tenant instead of an empty database
        #[arg(long, value_name = "TENANT")]
        template: Option<String>,
        /// The copy is what that tenant was at this time: '2026-11-21 18:05:00', in UTC
        #[arg(long, value_name = "TIME", requires = "template")]
        at: Option<String>,
    },
    /// Drop tenants and all their data, for good
    Drop {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Give a tenant another name
    Rename {
        /// Its name
        from: String,
        /// The name it gets
        to: String,
    },
    /// Show all tenants
    List,
    /// Show the times to which a tenant can be restored
    History {
        /// Its name
        name: String,
    },
    /// Make a tenant what it was at a time; its sessions end
    Restore {
        /// Its name
        name: String,
        /// The time: '2026-11-21 18:05:00', in UTC. The last version at or before it is taken
        #[arg(long, value_name = "TIME")]
        to: String,
    },
    /// Load a file into a table of a tenant: all of its rows, or none
    Load(LoadArgs),
    /// Write a tenant as a plain SQLite file, while it is in use
    Export(ExportArgs),
    /// Make a tenant of a plain SQLite file
    Import(ImportArgs),
    /// Run a script in many tenants, in one transaction each
    #[command(after_help = EXEC_EXAMPLES)]
    Exec(ExecArgs),
}

/// `fulmar tenant load`
#[derive(Args, Debug)]
pub struct LoadArgs {
    /// The tenant
    pub name: String,
    /// The table; it must be there
    pub table: String,
    /// The file; - is the standard input. NAME.csv is CSV, all others PostgreSQL's text format
    #[arg(default_value = "-")]
    pub file: PathBuf,
    /// The columns that the file has, in its order [default: those of the table]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub columns: Vec<String>,
    /// The file is CSV, whatever its name
    #[arg(long)]
    pub csv: bool,
    /// The first line names the columns
    #[arg(long)]
    pub header: bool,
    /// What stands between two columns [default: a comma in CSV, else a tab]
    #[arg(long, value_name = "CHAR")]
    pub delimiter: Option<String>,
    /// How NULL is written [default: nothing in CSV, else \\N]
    #[arg(long, value_name = "TEXT")]
    pub null: Option<String>,
}

/// `fulmar tenant export`
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// The tenant
    pub name: String,
    /// The file; it must not be there. - is the standard output
    pub file: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
    /// What the tenant was at this time: '2026-11-21 18:05:00', in UTC. The last version at or before it is taken
    #[arg(long, value_name = "TIME")]
    pub at: Option<String>,
}

/// `fulmar tenant import`
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// The tenant; it must not be there
    pub name: String,
    /// The file: an SQLite database with pages of 4096 bytes, in UTF-8. - is the standard input
    pub file: PathBuf,
    /// The user that it belongs to [default: the user that asks]
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
}

const EXEC_EXAMPLES: &str = "\
Examples:
  fulmar tenant exec --all -f migrate.sql
  fulmar tenant exec --like 'shop-%' -f migrate.sql --jobs 32
  fulmar tenant exec shop store -c 'UPDATE setting SET currency = 1'

What has been done is noted in migrate.sql.state: run the same again, after Ctrl-C or when what failed has
been mended, and it goes on with the other tenants. A script that was changed is another one, and so is the
same script for another server.

Exit code 1 if it failed in any tenant; in those nothing of it is kept.";

/// `fulmar tenant exec`
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("tenants").required(true).multiple(false).args(["names", "all", "like"])))]
#[command(group(ArgGroup::new("text").required(true).multiple(false).args(["file", "command"])))]
pub struct ExecArgs {
    /// The tenants
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// All tenants, but for the system's own
    #[arg(long)]
    pub all: bool,
    /// Tenants whose names are LIKE this, as SQLite's LIKE compares
    #[arg(long, value_name = "PATTERN")]
    pub like: Option<String>,
    /// The script; its answers are not shown
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The script itself
    #[arg(short, long, value_name = "SQL")]
    pub command: Option<String>,
    /// How many tenants it runs in at a time
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub jobs: u16,
    /// Each statement on its own, for scripts with VACUUM: what fails half-way stays half done
    #[arg(long)]
    pub no_transaction: bool,
    /// Where is noted what was done [default: that of -f with .state behind its name; none with -c]
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
}
