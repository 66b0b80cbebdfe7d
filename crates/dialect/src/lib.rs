//! PostgreSQL's SQL on SQLite: translates statements, infers the types of expressions, and provides
//! the system catalog (`pg_catalog`, `information_schema`).
//!
//! Fulmar's SQL dialect is SQLite's. psql, pgbench and drivers also send PostgreSQL statements of
//! their own: they set parameters, call `version()`, create databases, copy rows and query the
//! catalog. This crate recognizes those statements. It executes none of them, and knows no session:
//! what it needs of one is passed in ([`Context`], [`system::Viewer`]).
//!
//! ```text
//! text of a statement                 front: first keyword
//!
//! SELECT abalance FROM ...            Pass        SQLite syntax: the engine prepares it unchanged
//! CREATE TABLE t (...) WITH (...)     Rewritten   the engine prepares the rewritten text
//! SELECT 't'::regclass                Translated  as above, with the system tables and functions
//! SET statement_timeout = '5s'        Command     the gateway executes it
//! ```
//!
//! [`translate()`] looks at the first keyword and at three-byte windows of the text. For most
//! statements this is the whole cost, and they reach SQLite byte for byte. Rewriting replaces whole
//! tokens and never substitutes inside the text, so a string literal or a comment cannot be
//! mistaken for syntax.
//!
//! | module | contents |
//! | --- | --- |
//! | [`token`] | the lexer, which agrees with SQLite's about where a statement ends |
//! | `dispatch`, [`statement`] | the classification, and its results |
//! | `functions` | literals for `version()`, `current_user` and the like |
//! | `catalog` | PostgreSQL's SELECT syntax to SQLite's, for queries of the system catalog |
//! | `schema`, [`primary_key`] | CREATE TABLE, DROP, TRUNCATE, ALTER TABLE ... ADD PRIMARY KEY |
//! | `setting`, [`admin`] | SET and SHOW; administration of databases and users |
//! | [`copy`], [`procedure`] | COPY; CREATE PROCEDURE |
//! | [`infer`] | result types of expressions, from the text of a SELECT |
//! | [`system`] | the tables and functions of the system catalog |
//!
//! # An example
//!
//! `SELECT c.oid::regclass FROM pg_class c WHERE relkind = ANY (ARRAY['r', 'v'])` becomes
//! `SELECT pg_regclass(c.oid) FROM pg_class c WHERE relkind IN ('r', 'v')`. `pg_class` and
//! `pg_regclass` are registered with SQLite by the engine; [`system::Catalog`] produces their rows
//! and results for the querying session.
//!
//! # Limits
//!
//! Texts are not trusted: nesting and chains are bounded before SQLite checks its own limits, and
//! the targets `fuzz_...` compare the lexer with SQLite's. Memory for tokens is proportional to the
//! text; [`token::first_statement_extent`] counts the tokens of a long text before they are stored,
//! so that the caller can charge the memory first.

pub mod admin;
mod catalog;
pub mod copy;
mod dispatch;
mod functions;
pub mod infer;
pub mod primary_key;
pub mod procedure;
mod schema;
mod setting;
pub mod statement;
mod syntax;
pub mod system;
pub mod token;

pub use catalog::Translated;
pub use dispatch::{needs_translation, translate};
pub use fulmar_pgwire::Result;
pub use statement::{Command, Context, Dispatch};
pub use syntax::shorten;
