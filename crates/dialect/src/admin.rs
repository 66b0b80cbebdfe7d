//! Parses administration of tenants and users: PostgreSQL's statements about databases and roles.

use fulmar_meta::{Access, Unit};
use fulmar_pgwire::types::datetime::parse_timestamp;
use fulmar_sqlite::{Error, sqlstate};

use crate::Result;
use crate::setting::{assignment, parameter};
use crate::syntax::{end, shorten, unexpected};
use crate::token::Cursor;

/// A token that expires sooner is of no use.
const MIN_TOKEN_LIFETIME_MS: u64 = 60_000;

/// An administration statement.
#[derive(Clone, Debug, PartialEq)]
pub enum AdminStatement {
    /// `CREATE DATABASE`.
    CreateDatabase {
        /// The name of the database.
        name: String,
        /// The owner. `None` is the current user.
        owner: Option<String>,
        /// The template. `None` creates an empty database.
        source: Option<Source>,
        /// The durability. `None` is the default.
        durability: Option<String>,
    },
    /// `DROP DATABASE`.
    DropDatabase {
        /// The name of the database.
        name: String,
        /// Whether a missing object is ignored.
        if_exists: bool,
        /// Whether its sessions are terminated.
        force: bool,
    },
    /// `ALTER DATABASE ... RENAME TO`.
    RenameDatabase {
        /// The current name.
        from: String,
        /// The new name.
        to: String,
    },
    /// `RESTORE TO TIMESTAMP`, in milliseconds since 1970.
    RestoreDatabase {
        /// The name of the database.
        name: String,
        /// The time, in milliseconds since 1970.
        at_unix_ms: u64,
    },
    /// `ALTER DATABASE ... RESUME`, which ends a quarantine.
    ResumeDatabase {
        /// The name of the database.
        name: String,
    },
    /// `ALTER DATABASE ... MOVE TO 'node' [USING mechanism] [LIMIT 'rate']`.
    MoveDatabase {
        /// The name of the database.
        name: String,
        /// The name of the node.
        node: String,
        /// The name of the mechanism.
        mechanism: Option<String>,
        /// The size of what may be copied per second.
        limit: Option<String>,
    },
    /// `ALTER DATABASE ... CANCEL MOVE`.
    CancelMove {
        /// The name of the database.
        name: String,
    },
    /// `ALTER DATABASE ... PIN` or `UNPIN`: whether the controller may move it.
    PinDatabase {
        /// The name of the database.
        name: String,
        /// Whether it is pinned.
        is_pinned: bool,
    },
    /// `ALTER NODE ... MOVE TO`: all databases of a node.
    MoveNode {
        /// The name of the node that has them.
        name: String,
        /// The name of the node that gets them.
        node: String,
        /// The name of the mechanism for each.
        mechanism: Option<String>,
        /// The size of what may be copied per second, for each.
        limit: Option<String>,
    },
    /// `ALTER NODE ... FORBID` or `ALLOW`: whether the controller may move databases to it.
    ForbidNode {
        /// The name of the node.
        name: String,
        /// Whether it is forbidden.
        is_forbidden: bool,
    },
    /// `ALTER SYSTEM SET name = value` or `RESET name`: a setting of the cluster.
    AlterSystem {
        /// The name of the setting.
        name: String,
        /// The new value. `None` is the default.
        value: Option<String>,
    },
    /// `ALTER SYSTEM CANCEL PLAN`: the controller gives its plan up.
    CancelPlan,
    /// `SET name = value`, or `RESET name`, which has no value.
    AlterLimit {
        /// The name of the database.
        database: String,
        /// The name of the limit.
        name: String,
        /// The new value. `None` is the default.
        value: Option<String>,
    },
    /// `RESET ALL`.
    ResetLimits {
        /// The name of the database.
        database: String,
    },
    /// `CREATE USER`, `CREATE ROLE`.
    CreateUser {
        /// The name of the user.
        name: String,
        /// Whether the user is a superuser.
        superuser: bool,
        /// The password.
        password: Option<String>,
    },
    /// `None` removes the password.
    AlterPassword {
        /// The name of the user.
        name: String,
        /// The password.
        password: Option<String>,
    },
    /// `DROP USER`, `DROP ROLE`.
    DropUser {
        /// The names of the users.
        names: Vec<String>,
        /// Whether a missing object is ignored.
        if_exists: bool,
    },
    /// `GRANT ... ON DATABASE`.
    Grant {
        /// The right.
        access: Access,
        /// The names of the databases.
        databases: Vec<String>,
        /// The names of the users.
        users: Vec<String>,
    },
    /// `REVOKE ... ON DATABASE`.
    Revoke {
        /// The right.
        access: Access,
        /// The names of the databases.
        databases: Vec<String>,
        /// The names of the users.
        users: Vec<String>,
    },
    /// Without a database, the token is valid for the whole node. Without a lifetime, it never
    /// expires.
    CreateToken {
        /// The name of the token.
        name: String,
        /// The database whose statistics the token shows. `None` for the whole node.
        database: Option<String>,
        /// Whether the token administers, as a superuser does, and not only shows statistics.
        is_admin: bool,
        /// The lifetime in milliseconds. `None` if it never expires.
        lasts_ms: Option<u64>,
    },
    /// `DROP TOKEN`.
    DropToken {
        /// The name of the token.
        name: String,
        /// Whether a missing object is ignored.
        if_exists: bool,
    },
    /// `DROP NODE`: removes a node from the cluster.
    DropNode {
        /// The name of the node.
        name: String,
    },
}

/// The database to copy or branch, and the time to branch it at, in milliseconds since 1970.
/// Without a time, the current state is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The name of the database.
    pub database: String,
    /// The time, in milliseconds since 1970.
    pub at_unix_ms: Option<u64>,
}

impl AdminStatement {
    /// The command tag of the statement.
    pub fn tag(&self) -> &'static str {
        match self {
            AdminStatement::CreateDatabase { .. } => "CREATE DATABASE",
            AdminStatement::DropDatabase { .. } => "DROP DATABASE",
            AdminStatement::RenameDatabase { .. }
            | AdminStatement::RestoreDatabase { .. }
            | AdminStatement::ResumeDatabase { .. }
            | AdminStatement::MoveDatabase { .. }
            | AdminStatement::CancelMove { .. }
            | AdminStatement::PinDatabase { .. }
            | AdminStatement::AlterLimit { .. }
            | AdminStatement::ResetLimits { .. } => "ALTER DATABASE",
            AdminStatement::CreateUser { .. } => "CREATE ROLE",
            AdminStatement::AlterPassword { .. } => "ALTER ROLE",
            AdminStatement::DropUser { .. } => "DROP ROLE",
            AdminStatement::Grant { .. } => "GRANT",
            AdminStatement::Revoke { .. } => "REVOKE",
            AdminStatement::CreateToken { .. } => "CREATE TOKEN",
            AdminStatement::DropToken { .. } => "DROP TOKEN",
            AdminStatement::DropNode { .. } => "DROP NODE",
            AdminStatement::ForbidNode { .. } | AdminStatement::MoveNode { .. } => "ALTER NODE",
            AdminStatement::AlterSystem { .. } | AdminStatement::CancelPlan => "ALTER SYSTEM",
        }
    }
}

/// Parses a statement. Returns `None` if it is about something else.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>) -> Result<Option<AdminStatement>> {
    let user =
        |cursor: &mut Cursor<'_, '_>, verb| cursor.words(&[verb, "user"]) || cursor.words(&[verb, "role"]);
    let admin = if cursor.words(&["create", "database"]) {
        create_database(cursor)?
    } else if cursor.words(&["drop", "database"]) {
        drop_database(cursor)?
    } else if cursor.words(&["alter", "database"]) {
        alter_database(cursor)?
    } else if user(cursor, "create") {
        create_user(cursor)?
    } else if user(cursor, "alter") {
        alter_user(cursor)?
    } else if user(cursor, "drop") {
        let if_exists = cursor.words(&["if", "exists"]);
        AdminStatement::DropUser { names: names(cursor)?, if_exists }
    } else if cursor.words(&["create", "token"]) {
        create_token(cursor)?
    } else if cursor.words(&["drop", "token"]) {
        let if_exists = cursor.words(&["if", "exists"]);
        AdminStatement::DropToken { name: name(cursor)?, if_exists }
    } else if cursor.words(&["drop", "node"]) {
        AdminStatement::DropNode { name: name(cursor)? }
    } else if cursor.words(&["alter", "node"]) {
        alter_node(cursor)?
    } else if cursor.words(&["alter", "system"]) {
        alter_system(cursor)?
    } else if cursor.word("grant") {
        let (access, databases, users) = privileges(cursor, "to")?;
        AdminStatement::Grant { access, databases, users }
    } else if cursor.word("revoke") {
        let (access, databases, users) = privileges(cursor, "from")?;
        cursor.word("cascade");
        cursor.word("restrict");
        AdminStatement::Revoke { access, databases, users }
    } else {
        return Ok(None);
    };
    end(cursor)?;
    Ok(Some(admin))
}

/// `name FORBID`, `name ALLOW` or `name MOVE TO`.
fn alter_node(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let name = name_or_string(cursor)?;
    if cursor.words(&["move", "to"]) {
        let (node, mechanism, limit) = destination(cursor)?;
        return Ok(AdminStatement::MoveNode { name, node, mechanism, limit });
    }
    let is_forbidden = cursor.word("forbid");
    if !is_forbidden && !cursor.word("allow") {
        return Err(unexpected(cursor).hint("The actions are FORBID, ALLOW and MOVE TO."));
    }
    Ok(AdminStatement::ForbidNode { name, is_forbidden })
}

/// `node [USING mechanism] [LIMIT rate]`.
fn destination(cursor: &mut Cursor<'_, '_>) -> Result<(String, Option<String>, Option<String>)> {
    let node = name_or_string(cursor)?;
    let mechanism = cursor.word("using").then(|| name_or_string(cursor)).transpose()?;
    let limit = cursor.word("limit").then(|| name_or_string(cursor)).transpose()?;
    Ok((node, mechanism, limit))
}

/// `SET name = value`, `RESET name` or `CANCEL PLAN`.
fn alter_system(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    if cursor.words(&["cancel", "plan"]) {
        Ok(AdminStatement::CancelPlan)
    } else if cursor.word("set") {
        let (name, value) = assignment(cursor)?;
        Ok(AdminStatement::AlterSystem { name, value })
    } else if cursor.word("reset") {
        Ok(AdminStatement::AlterSystem { name: parameter(cursor)?, value: None })
    } else {
        Err(unexpected(cursor).hint("The actions are SET, RESET and CANCEL PLAN."))
    }
}

fn name(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    cursor.name().ok_or_else(|| unexpected(cursor))
}

/// A name, or a string constant.
fn name_or_string(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    match cursor.string() {
        Some(text) => Ok(text),
        None => name(cursor),
    }
}

fn names(cursor: &mut Cursor<'_, '_>) -> Result<Vec<String>> {
    let mut names = vec![name(cursor)?];
    while cursor.symbol(',') {
        names.push(name(cursor)?);
    }
    Ok(names)
}

fn create_database(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let database = name(cursor)?;
    let (mut owner, mut source, mut durability) = (None, None, None);
    cursor.word("with");
    while !cursor.is_end() {
        let option = name(cursor)?;
        cursor.symbol('=');
        match option.as_str() {
            "owner" => owner = Some(name(cursor)?),
            // `template0`, PostgreSQL's empty template, means no template.
            "template" => {
                let database = Some(name(cursor)?).filter(|name| name != "template0");
                source = database.map(|database| Source { database, at_unix_ms: None });
            }
            "branch" => source = Some(branch(cursor)?),
            "durability" => durability = Some(cursor.string().map_or_else(|| name(cursor), Ok)?),
            "encoding" => encoding(cursor)?,
            _ => {
                return Err(Error::new(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("option \"{option}\" not recognized"),
                )
                .hint("The options are OWNER, TEMPLATE, BRANCH OF, DURABILITY and ENCODING."));
            }
        }
    }
    Ok(AdminStatement::CreateDatabase { name: database, owner, source, durability })
}

/// The part after `BRANCH`: `OF name [AT TIMESTAMP '...']`.
fn branch(cursor: &mut Cursor<'_, '_>) -> Result<Source> {
    if !cursor.word("of") {
        return Err(unexpected(cursor));
    }
    let database = name(cursor)?;
    let at_unix_ms = cursor.words(&["at", "timestamp"]).then(|| unix_ms(cursor)).transpose()?;
    Ok(Source { database, at_unix_ms })
}

/// A timestamp as milliseconds since 1970. Without a time zone it is UTC.
fn unix_ms(cursor: &mut Cursor<'_, '_>) -> Result<u64> {
    let text = cursor.string().ok_or_else(|| unexpected(cursor))?;
    parse_timestamp_unix_ms(&text)
}

/// Parses a timestamp into milliseconds since 1970. Without a time zone it is UTC.
pub fn parse_timestamp_unix_ms(text: &str) -> Result<u64> {
    const FROM_1970_TO_2000_US: i64 = 946_684_800_000_000;
    let since_2000_us = parse_timestamp(text.trim().as_bytes()).ok_or_else(|| {
        let message = format!("invalid input syntax for type timestamp: \"{}\"", shorten(text));
        Error::new(sqlstate::INVALID_DATETIME, message).hint(
            "Write it in UTC, as '2026-11-21 18:05:00', or with an offset, as '2026-11-21 19:05:00+01'.",
        )
    })?;
    let since_1970_us = since_2000_us.saturating_add(FROM_1970_TO_2000_US);
    Ok(u64::try_from(since_1970_us / 1000).unwrap_or(0))
}

fn encoding(cursor: &mut Cursor<'_, '_>) -> Result<()> {
    let encoding = cursor.string().ok_or_else(|| unexpected(cursor))?;
    if matches!(encoding.to_lowercase().replace('-', "").as_str(), "utf8" | "unicode") {
        return Ok(());
    }
    Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, format!("encoding \"{encoding}\" is not supported"))
        .hint("All text is UTF-8."))
}

fn drop_database(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let if_exists = cursor.words(&["if", "exists"]);
    let name = name(cursor)?;
    cursor.word("with");
    let mut force = false;
    if cursor.symbol('(') {
        force = cursor.word("force");
        if !force || !cursor.symbol(')') {
            return Err(unexpected(cursor));
        }
    }
    Ok(AdminStatement::DropDatabase { name, if_exists, force })
}

fn alter_database(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let database = name(cursor)?;
    if cursor.words(&["rename", "to"]) {
        Ok(AdminStatement::RenameDatabase { from: database, to: name(cursor)? })
    } else if cursor.words(&["restore", "to", "timestamp"]) {
        Ok(AdminStatement::RestoreDatabase { name: database, at_unix_ms: unix_ms(cursor)? })
    } else if cursor.word("resume") {
        Ok(AdminStatement::ResumeDatabase { name: database })
    } else if cursor.words(&["move", "to"]) {
        let (node, mechanism, limit) = destination(cursor)?;
        Ok(AdminStatement::MoveDatabase { name: database, node, mechanism, limit })
    } else if cursor.words(&["cancel", "move"]) {
        Ok(AdminStatement::CancelMove { name: database })
    } else if cursor.word("pin") {
        Ok(AdminStatement::PinDatabase { name: database, is_pinned: true })
    } else if cursor.word("unpin") {
        Ok(AdminStatement::PinDatabase { name: database, is_pinned: false })
    } else if cursor.word("set") {
        let (name, value) = assignment(cursor)?;
        Ok(AdminStatement::AlterLimit { database, name, value })
    } else if cursor.words(&["reset", "all"]) {
        Ok(AdminStatement::ResetLimits { database })
    } else if cursor.word("reset") {
        Ok(AdminStatement::AlterLimit { database, name: name(cursor)?, value: None })
    } else {
        Err(Error::new(
            sqlstate::FEATURE_NOT_SUPPORTED,
            "ALTER DATABASE supports only RENAME TO, RESTORE TO TIMESTAMP, MOVE TO, CANCEL MOVE, PIN, UNPIN, RESUME, \
             SET and RESET",
        ))
    }
}

/// `[WITH] [ENCRYPTED] PASSWORD 'text' | PASSWORD NULL`, among other options.
fn password(cursor: &mut Cursor<'_, '_>) -> Result<Option<Option<String>>> {
    cursor.word("encrypted");
    if !cursor.word("password") {
        return Ok(None);
    }
    if cursor.word("null") {
        return Ok(Some(None));
    }
    match cursor.string() {
        Some(password) => Ok(Some(Some(password))),
        None => Err(unexpected(cursor)),
    }
}

fn create_user(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let name = name(cursor)?;
    let (mut superuser, mut secret) = (false, None);
    cursor.word("with");
    while !cursor.is_end() {
        if let Some(password) = password(cursor)? {
            secret = password;
        } else if cursor.word("superuser") {
            superuser = true;
        } else if !cursor.word("nosuperuser") && !cursor.word("login") {
            return Err(
                unexpected(cursor).hint("The options are SUPERUSER, NOSUPERUSER, LOGIN and PASSWORD.")
            );
        }
    }
    Ok(AdminStatement::CreateUser { name, superuser, password: secret })
}

fn alter_user(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let name = name(cursor)?;
    cursor.word("with");
    let password = password(cursor)?
        .ok_or_else(|| unexpected(cursor).hint("Only the password of a user can be changed."))?;
    Ok(AdminStatement::AlterPassword { name, password })
}

/// `name [FOR DATABASE db | FOR ADMIN] [EXPIRES IN 'time']`.
fn create_token(cursor: &mut Cursor<'_, '_>) -> Result<AdminStatement> {
    let token = name(cursor)?;
    let is_admin = cursor.words(&["for", "admin"]);
    let database = (!is_admin && cursor.words(&["for", "database"])).then(|| name(cursor)).transpose()?;
    let mut lasts_ms = None;
    if cursor.words(&["expires", "in"]) {
        let text = cursor.string().ok_or_else(|| unexpected(cursor))?;
        lasts_ms = Some(token_lifetime_ms(&text)?);
    }
    Ok(AdminStatement::CreateToken { name: token, database, is_admin, lasts_ms })
}

/// Parses a token's lifetime. The unit is mandatory: `90` probably means 90 days, and not the 90 ms
/// that it means in other settings.
fn token_lifetime_ms(text: &str) -> Result<u64> {
    let problem = match Unit::Milliseconds.parse(text) {
        None => "is not a time interval",
        Some(_) if text.trim_end().ends_with(|c: char| !c.is_ascii_lowercase()) => "has no unit",
        Some(lifetime) if lifetime < MIN_TOKEN_LIFETIME_MS => "is too short",
        Some(lifetime) => return Ok(lifetime),
    };
    let message = format!("\"{}\" {problem}", shorten(text));
    Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
        .hint("Use a form such as '90d' or '12h'. The units are s, min, h and d; the minimum is 1 min."))
}

/// `CONNECT ON DATABASE a, b TO|FROM u, v`. `SELECT` instead of `CONNECT` is read-only access.
fn privileges(cursor: &mut Cursor<'_, '_>, preposition: &str) -> Result<(Access, Vec<String>, Vec<String>)> {
    let access = if cursor.words(&["all", "privileges"]) || cursor.word("all") || cursor.word("connect") {
        Some(Access::ReadWrite)
    } else {
        cursor.word("select").then_some(Access::ReadOnly)
    };
    let Some(access) = access.filter(|_| cursor.words(&["on", "database"])) else {
        return Err(Error::new(
            sqlstate::FEATURE_NOT_SUPPORTED,
            "only CONNECT and SELECT on databases can be granted or revoked",
        )
        .hint("CONNECT allows reading and writing a database, SELECT only reading it."));
    };
    let databases = names(cursor)?;
    if !cursor.word(preposition) {
        return Err(unexpected(cursor));
    }
    Ok((access, databases, names(cursor)?))
}
