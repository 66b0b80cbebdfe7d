//! Replaces calls of PostgreSQL's session functions by literals, and detects statements about the
//! system catalog.
//!
//! Clients send `SELECT version()` and `SELECT current_database()`. The results are constant for a
//! session, so the call is replaced by a literal, and the function's name becomes the column's
//! name. Statements that use none of these names, which is nearly all, are recognized in one pass
//! over their bytes.

use fulmar_pgwire::version_text;

use crate::statement::{Context, Dispatch};
use crate::syntax::first_has;
use crate::token::{Lexer, Token, TokenKind, first_statement, quote_name, quote_text};
use crate::{Result, catalog};

/// Functions that are called with empty parentheses.
const NO_ARGUMENT_FUNCTIONS: [&str; 5] =
    ["version", "now", "current_database", "current_schema", "pg_backend_pid"];
/// Functions that SQL writes without parentheses.
const BARE_FUNCTIONS: [&str; 5] =
    ["current_user", "session_user", "current_role", "current_catalog", "current_schema"];

/// Handles a statement that reads or writes rows.
pub(super) fn translate<'a>(sql: &'a str, context: &Context<'_>) -> Result<Dispatch<'a>> {
    if !first_has(sql, may_concern) {
        return Ok(Dispatch::Pass);
    }
    let (tokens, rest) = first_statement(sql);
    let rewritten = rewrite(sql, &tokens, context);
    let tokens = match &rewritten {
        Some(text) => {
            drop(tokens);
            first_statement(text).0
        }
        None => tokens,
    };
    if catalog::needs_translation(tokens.iter().copied()) {
        return Ok(Dispatch::Translated(catalog::translate(&tokens)?, rest));
    }
    Ok(rewritten.map_or(Dispatch::Pass, |text| Dispatch::Rewritten(text, rest)))
}

/// Returns true if [`translate`] may translate the first statement of `sql`.
pub(super) fn may_translate(sql: &str) -> bool {
    first_has(sql, may_concern)
        && catalog::needs_translation(Lexer::new(sql).take_while(|token| !token.is_symbol(';')))
}

/// Returns true if one of the names may be in the text. Each of them contains one of these windows.
fn may_concern(window: [u8; 3]) -> bool {
    match window {
        // pg_class, current_user, session_user, version(), now()
        [b'p', b'g', b'_'] | [b'n', b't', b'_'] | [b'o', b'n', b'_' | b'('] | [b'o', b'w', b'('] => true,
        [b'o', b'n' | b'w', blank] => blank.is_ascii_whitespace(),
        // information_schema, fulmar.limits, regclass, quote_ident, set_config, format_type,
        // has_..._privilege, obj_description
        [b'n', b'_', b's']
        | [b'e', b't', b'_']
        | [b'a', b'r', b'.']
        | [b'r', b'e', b'g']
        | [b't', b'e', b'_'] => true,
        [b'e', b'_', b'i'] | [b'o', b'_', b'a'] => true, // parse_ident, string_to_array
        [b'_', b't', b'y'] | [b'_', b'p', b'r'] | [b'_', b'd', b'e'] => true,
        // any, all, some, CAST, ::
        [b'a', b'n', b'y']
        | [b'a', b'l', b'l']
        | [b's', b'o', b'm']
        | [b'a', b's', b't']
        | [_, b':', b':'] => true,
        _ => false,
    }
}

fn rewrite(sql: &str, tokens: &[Token<'_>], context: &Context<'_>) -> Option<String> {
    let mut text = String::new();
    let mut copied = 0;
    let mut list = SelectList::default();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let before = at.checked_sub(1).map(|before| &tokens[before]);
        let Some(call) = call(&tokens[at..], before) else {
            list.advance(token);
            at += 1;
            continue;
        };
        let (last, next) = (&tokens[at + call.tokens - 1], tokens.get(at + call.tokens));
        text.push_str(&sql[copied..token.start]);
        text.push_str(&literal(&call.name, context));
        if list.is_item(before, next) {
            text.push_str(&format!(" AS {}", quote_name(&call.name)));
        }
        copied = last.end();
        at += call.tokens;
    }
    if copied == 0 {
        return None;
    }
    text.push_str(&sql[copied..tokens.last()?.end()]);
    Some(text)
}

/// Tracks whether the current token is in the statement's select list.
#[derive(Default)]
struct SelectList {
    depth: u32,
    inside: bool,
}

impl SelectList {
    fn advance(&mut self, token: &Token<'_>) {
        if token.is_symbol('(') {
            self.depth += 1;
        } else if token.is_symbol(')') {
            self.depth = self.depth.saturating_sub(1);
        } else if self.depth == 0 && token.kind == TokenKind::Word {
            let ends = ["from", "where", "group", "order", "limit", "union"];
            self.inside = token.is("select") || (self.inside && !ends.iter().any(|word| token.is(word)));
        }
    }

    /// Returns true if the tokens between these two are a complete item of the list, which gives
    /// the column its name.
    fn is_item(&self, before: Option<&Token<'_>>, after: Option<&Token<'_>>) -> bool {
        let starts = before.is_some_and(|token| token.is("select") || token.is_symbol(','));
        let ends = after.is_none_or(|token| token.is_symbol(',') || token.is("from"));
        self.depth == 0 && self.inside && starts && ends
    }
}

/// A call of one of the session functions.
struct Call {
    name: String,
    /// The number of tokens of the call.
    tokens: usize,
}

fn call(tokens: &[Token<'_>], before: Option<&Token<'_>>) -> Option<Call> {
    if before.is_some_and(|token| token.is_symbol('.')) {
        return None; // a column of that name
    }
    let qualified = tokens[0].is("pg_catalog") && tokens.get(1).is_some_and(|token| token.is_symbol('.'));
    let skipped = if qualified { 2 } else { 0 };
    let function = tokens.get(skipped).filter(|token| token.kind == TokenKind::Word)?;
    let has = |index: usize, sign| tokens.get(skipped + index).is_some_and(|token| token.is_symbol(sign));
    let named = |names: &[&str]| names.iter().any(|name| function.is(name));
    if has(1, '(') {
        let known = named(&NO_ARGUMENT_FUNCTIONS) && has(2, ')');
        return known.then(|| Call { name: function.text.to_ascii_lowercase(), tokens: skipped + 3 });
    }
    let bare = named(&BARE_FUNCTIONS) && !has(1, '.');
    bare.then(|| Call { name: function.text.to_ascii_lowercase(), tokens: skipped + 1 })
}

fn literal(name: &str, context: &Context<'_>) -> String {
    match name {
        "version" => quote_text(&version_text()),
        // In SQLite too, this is the time at which the transaction began.
        "now" => "CURRENT_TIMESTAMP".to_owned(),
        "current_database" | "current_catalog" => quote_text(context.database),
        "current_schema" => "'public'".to_owned(),
        "pg_backend_pid" => context.pid.to_string(),
        _ => quote_text(context.user),
    }
}
