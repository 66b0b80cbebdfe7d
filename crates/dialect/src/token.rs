//! A lexer for SQL text, as far as the dialect needs one.
//!
//! It recognizes everything whose content must not be read as SQL: strings (`'it''s'`, `E'\n'`),
//! quoted names, comments, numbers and parameters. It never fails. An unterminated string or
//! comment extends to the end of the text, and SQLite reports the error.

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A keyword or an unquoted name.
    Word,
    /// `"a name"`, or SQLite's `[a name]` and `` `a name` ``.
    Quoted,
    /// `'text'`, `E'text'`, or `$tag$text$tag$`.
    String,
    /// `12`, `1.5e3`.
    Number,
    /// `$1`.
    Parameter,
    /// Any other single character.
    Symbol,
}

/// A token and its position in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// The kind of the token.
    pub kind: TokenKind,
    /// Its text.
    pub text: &'a str,
    /// Offset of its first byte.
    pub start: usize,
}

impl Token<'_> {
    /// Offset of the byte after its last.
    pub fn end(&self) -> usize {
        self.start + self.text.len()
    }

    /// Returns true for this keyword, in any letter case.
    pub fn is(&self, word: &str) -> bool {
        self.kind == TokenKind::Word && self.text.eq_ignore_ascii_case(word)
    }

    /// Returns true for this character.
    pub fn is_symbol(&self, sign: char) -> bool {
        self.kind == TokenKind::Symbol && self.text.starts_with(sign)
    }

    /// The name that the token denotes. Unquoted names are folded to lower case, as in PostgreSQL.
    pub fn name(&self) -> Option<String> {
        match self.kind {
            TokenKind::Word => Some(self.text.to_lowercase()),
            TokenKind::Quoted => Some(match self.text.strip_prefix('[') {
                Some(inner) => inner.strip_suffix(']').unwrap_or(inner).to_owned(),
                None => unquote(self.text, if self.text.starts_with('`') { '`' } else { '"' }),
            }),
            _ => None,
        }
    }

    /// The value of a string literal.
    pub fn string(&self) -> Option<String> {
        if self.kind != TokenKind::String {
            return None;
        }
        if self.text.starts_with('$') {
            let tag = dollar_tag(self.text)?;
            let inner = &self.text[tag.len()..];
            return Some(inner.strip_suffix(tag).unwrap_or(inner).to_owned());
        }
        match self.text.strip_prefix(['E', 'e']) {
            Some(quoted) => Some(unescape(&unquote(quoted, '\''))),
            None => Some(unquote(self.text, '\'')),
        }
    }
}

fn unquote(text: &str, quote: char) -> String {
    let inner = text.strip_prefix(quote).unwrap_or(text);
    let inner = inner.strip_suffix(quote).unwrap_or(inner);
    inner.replace(&format!("{quote}{quote}"), &quote.to_string())
}

fn unescape(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            result.push(character);
            continue;
        }
        match characters.next() {
            Some('n') => result.push('\n'),
            Some('t') => result.push('\t'),
            Some('r') => result.push('\r'),
            Some('b') => result.push('\u{8}'),
            Some('f') => result.push('\u{c}'),
            Some(other) => result.push(other),
            None => result.push('\\'),
        }
    }
    result
}

/// Quotes a name for use in SQL text.
pub fn quote_name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Writes a text as an SQL literal.
pub fn quote_text(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// An iterator over the tokens of a text.
#[derive(Clone)]
pub struct Lexer<'a> {
    sql: &'a str,
    at: usize,
}

impl<'a> Lexer<'a> {
    /// Starts at the beginning of `sql`.
    pub fn new(sql: &'a str) -> Lexer<'a> {
        Lexer { sql, at: 0 }
    }

    fn skip_blanks(&mut self) {
        loop {
            let rest = &self.sql[self.at..];
            let trimmed = rest.trim_ascii_start();
            self.at += rest.len() - trimmed.len();
            let comment = if trimmed.starts_with("--") {
                trimmed.find('\n').map_or(trimmed.len(), |end| end + 1)
            } else if let Some(inside) = trimmed.strip_prefix("/*") {
                // The star of the opening `/*` does not close the comment: `/*/` is open.
                inside.find("*/").map_or(trimmed.len(), |end| end + 4)
            } else {
                return;
            };
            self.at += comment;
        }
    }
}

impl Lexer<'_> {
    /// Returns true if a bracket at the current position is a PostgreSQL subscript or array
    /// constructor (`array[1]`, `ARRAY[1, 2]`): it follows its operand without a blank, or follows
    /// ARRAY.
    fn is_subscript(&self) -> bool {
        let before = &self.sql.as_bytes()[..self.at];
        let touches = before.last().is_some_and(|byte| is_word(*byte) || b")]\"".contains(byte));
        touches
            || before
                .trim_ascii_end()
                .last_chunk()
                .is_some_and(|word: &[u8; 5]| word.eq_ignore_ascii_case(b"array"))
    }
}

/// The length of a quoted text in bytes, including its quotes. A doubled quote is part of the text.
fn quoted_length(text: &str, quote: u8, escapes: bool) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if escapes => at += 2,
            byte if byte == quote && bytes.get(at + 1) == Some(&quote) => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The opening `$tag$` of a dollar-quoted text. A tag does not start with a digit: `$1` is a
/// parameter.
fn dollar_tag(text: &str) -> Option<&str> {
    let tag = length_while(text.strip_prefix('$')?, is_word);
    let digit = text.as_bytes().get(1).is_some_and(u8::is_ascii_digit);
    (!digit && text.as_bytes().get(1 + tag) == Some(&b'$')).then(|| &text[..tag + 2])
}

/// The length of a dollar-quoted text in bytes, including its tags.
fn dollar_length(text: &str, tag: &str) -> usize {
    text[tag.len()..].find(tag).map_or(text.len(), |end| end + 2 * tag.len())
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn length_while(text: &str, belongs: impl Fn(u8) -> bool) -> usize {
    text.bytes().take_while(|byte| belongs(*byte)).count()
}

fn number_length(text: &str) -> usize {
    let mut length = length_while(text, |byte| byte.is_ascii_alphanumeric() || byte == b'.');
    let exponent = text[..length].ends_with(['e', 'E']) && !text.starts_with("0x");
    if exponent && text[length..].starts_with(['+', '-']) {
        length += 1 + length_while(&text[length + 1..], |byte| byte.is_ascii_digit());
    }
    length
}

impl<'a> Iterator for Lexer<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        self.skip_blanks();
        let rest = &self.sql[self.at..];
        let first = *rest.as_bytes().first()?;
        let (kind, length) = match first {
            b'\'' => (TokenKind::String, quoted_length(rest, b'\'', false)),
            b'E' | b'e' if rest.as_bytes().get(1) == Some(&b'\'') => {
                (TokenKind::String, 1 + quoted_length(&rest[1..], b'\'', true))
            }
            b'"' | b'`' => (TokenKind::Quoted, quoted_length(rest, first, false)),
            b'[' if !self.is_subscript() => {
                (TokenKind::Quoted, rest.find(']').map_or(rest.len(), |end| end + 1))
            }
            b'0'..=b'9' => (TokenKind::Number, number_length(rest)),
            b'$' => match dollar_tag(rest) {
                Some(tag) => (TokenKind::String, dollar_length(rest, tag)),
                None => (TokenKind::Parameter, 1 + length_while(&rest[1..], is_word)),
            },
            byte if is_word(byte) => {
                (TokenKind::Word, length_while(rest, |byte| is_word(byte) || byte == b'$'))
            }
            _ => (TokenKind::Symbol, 1),
        };
        // A backslash at the very end of the text counts one byte too many.
        let text = &rest[..length.min(rest.len())];
        let token = Token { kind, text, start: self.at };
        self.at += text.len();
        Some(token)
    }
}

/// From this length on, the tokens of a text are counted before they are stored.
pub const LONG_BYTES: usize = 64 << 10;

/// The position of the first statement in a text: without the semicolons before it, with the one
/// after it.
#[derive(Debug, PartialEq, Eq)]
pub struct StatementExtent {
    /// The offset of its first token.
    pub start: usize,
    /// The offset after its last token.
    pub end: usize,
    /// The number of its tokens.
    pub tokens: usize,
}

/// Finds the first statement of `sql`. Returns `None` if it is longer than `limit_bytes`. Stores no
/// tokens, and reads no further than the statement or the limit. A trigger, whose body contains
/// semicolons, ends with `; END ;`, as in the SQLite shell.
pub fn first_statement_extent(sql: &str, limit_bytes: usize) -> Option<StatementExtent> {
    let Some(first) = Lexer::new(sql).find(|token| !token.is_symbol(';')) else {
        return Some(StatementExtent { start: sql.len(), end: sql.len(), tokens: 0 });
    };
    let start = first.start;
    let limit = sql.floor_char_boundary(start.saturating_add(limit_bytes).saturating_add(1).min(sql.len()));
    let text = &sql[start..limit];
    let (mut tokens, mut trigger) = (0, false);
    // Whether the previous token was a semicolon, or an END after a semicolon.
    let (mut semicolon, mut end) = (false, false);
    for token in Lexer::new(text) {
        tokens += 1;
        if token.is_symbol(';') && (!trigger || end) {
            let end = start + token.end();
            return (token.start <= limit_bytes).then_some(StatementExtent { start, end, tokens });
        }
        trigger |= tokens <= 4 && first.is("create") && token.is("trigger");
        (semicolon, end) = (token.is_symbol(';'), semicolon && token.is("end"));
    }
    (limit == sql.len() && text.len() <= limit_bytes).then_some(StatementExtent { start, end: limit, tokens })
}

/// The tokens of the first statement of `sql`, and the text after its semicolon.
pub fn first_statement(sql: &str) -> (Vec<Token<'_>>, &str) {
    let mut tokens = Vec::new();
    if sql.len() >= LONG_BYTES {
        // Growing the list on demand could allocate twice the memory.
        tokens.reserve_exact(Lexer::new(sql).take_while(|token| !token.is_symbol(';')).count());
    }
    let mut lexer = Lexer::new(sql);
    for token in lexer.by_ref() {
        if token.is_symbol(';') {
            return (tokens, &sql[token.end()..]);
        }
        tokens.push(token);
    }
    (tokens, "")
}

/// Reads tokens in order.
pub(crate) struct Cursor<'a, 't> {
    tokens: &'t [Token<'a>],
}

impl<'a, 't> Cursor<'a, 't> {
    /// Starts at the first token.
    pub fn new(tokens: &'t [Token<'a>]) -> Cursor<'a, 't> {
        Cursor { tokens }
    }

    /// The tokens that have not been read.
    pub fn rest(&self) -> &'t [Token<'a>] {
        self.tokens
    }

    /// The next token, without consuming it.
    pub fn peek(&self) -> Option<&'t Token<'a>> {
        self.tokens.first()
    }

    /// Consumes a token.
    pub fn next(&mut self) -> Option<&'t Token<'a>> {
        let (token, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(token)
    }

    /// Consumes these keywords if all of them come next.
    pub fn words(&mut self, words: &[&str]) -> bool {
        let found = self.tokens.len() >= words.len()
            && words.iter().zip(self.tokens).all(|(word, token)| token.is(word));
        if found {
            self.tokens = &self.tokens[words.len()..];
        }
        found
    }

    /// Consumes this keyword if it comes next.
    pub fn word(&mut self, word: &str) -> bool {
        self.words(&[word])
    }

    /// Consumes this character if it comes next.
    pub fn symbol(&mut self, sign: char) -> bool {
        let found = self.peek().is_some_and(|token| token.is_symbol(sign));
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }

    /// Consumes a name.
    pub fn name(&mut self) -> Option<String> {
        let name = self.peek()?.name()?;
        self.tokens = &self.tokens[1..];
        Some(name)
    }

    /// Consumes a string literal.
    pub fn string(&mut self) -> Option<String> {
        let string = self.peek()?.string()?;
        self.tokens = &self.tokens[1..];
        Some(string)
    }

    /// Consumes a table name with an optional schema. The schema `public` becomes SQLite's `main`.
    pub fn table(&mut self) -> Option<TableName> {
        let first = self.name()?;
        if !self.symbol('.') {
            return Some(TableName { schema: None, name: first });
        }
        let name = self.name()?;
        let schema = if first == "public" { "main".to_owned() } else { first };
        Some(TableName { schema: Some(schema), name })
    }

    /// Returns true if all tokens have been read.
    pub fn is_end(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// The name of a table, with its schema if the statement names one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableName {
    /// The name of the schema, if the statement names it.
    pub schema: Option<String>,
    /// The name of the table.
    pub name: String,
}

impl TableName {
    /// The name as SQL text.
    pub fn sql(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", quote_name(schema), quote_name(&self.name)),
            None => quote_name(&self.name),
        }
    }
}

/// Returns true if a text contains no statement.
pub fn is_blank(text: &str) -> bool {
    text.trim_ascii_start().is_empty() || Lexer::new(text).all(|token| token.is_symbol(';'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(sql: &str) -> Vec<&str> {
        Lexer::new(sql).map(|token| token.text).collect()
    }

    #[test]
    fn splits_text_into_tokens() {
        assert_eq!(
            texts("SELECT a1,'it''s;' -- ;\n/* ; */\"x\"\"y\""),
            ["SELECT", "a1", ",", "'it''s;'", "\"x\"\"y\""]
        );
        assert_eq!(texts("a[1] ARRAY [2]"), ["a", "[", "1", "]", "ARRAY", "[", "2", "]"]);
        assert_eq!(texts("[a;b] `c``;` /*/ ; */ [open"), ["[a;b]", "`c``;`", "[open"]);
        assert_eq!(texts("E'a\\'b' || 1.5e-3+$12"), ["E'a\\'b'", "|", "|", "1.5e-3", "+", "$12"]);
        assert_eq!(texts("'open"), ["'open"]);
        assert_eq!(texts("E'\\"), ["E'\\"]);
        assert_eq!(texts("$$ a; '$1 $$ $a$ $$ $a$ $1"), ["$$ a; '$1 $$", "$a$ $$ $a$", "$1"]);
        assert_eq!(Lexer::new("$a$ $$ $a$").next().unwrap().string().unwrap(), " $$ ");
        assert_eq!(texts("$$open"), ["$$open"]);
        let (tokens, rest) = first_statement("a ';' ; b");
        assert_eq!((tokens.len(), rest), (2, " b"));
        assert_eq!(Lexer::new("E'a\\n''b'").next().unwrap().string().unwrap(), "a\n'b");
        assert_eq!(Lexer::new("\"A\"\"b\"").next().unwrap().name().unwrap(), "A\"b");
        assert_eq!(Lexer::new("[A\"b]").next().unwrap().name().unwrap(), "A\"b");
        assert_eq!(Lexer::new("`A``b`").next().unwrap().name().unwrap(), "A`b");
        assert_eq!(Lexer::new("Abc").next().unwrap().name().unwrap(), "abc");
    }

    #[test]
    fn measure_finds_the_end_of_the_first_statement() {
        let extent = |sql, limit| {
            first_statement_extent(sql, limit).map(|extent| (extent.start, extent.end, extent.tokens))
        };
        assert_eq!(extent("; SELECT 1; SELECT 2", 100), Some((2, 11, 3)));
        assert_eq!(extent("SELECT ';'", 10), Some((0, 10, 2)));
        assert_eq!(extent("SELECT ';'", 9), None);
        assert_eq!(extent("SELECT 12;SELECT 3", 9), Some((0, 10, 3)), "the limit excludes the semicolon");
        assert_eq!(extent("SELECT 12;SELECT 3", 8), None);
        assert_eq!(extent(" ;; -- nothing", 1), Some((14, 14, 0)));
        let trigger =
            "CREATE TEMP TRIGGER t AFTER INSERT ON a BEGIN SELECT CASE WHEN 1 THEN 2 END; END; SELECT 1";
        assert_eq!(
            first_statement_extent(trigger, 100).map(|extent| &trigger[extent.end..]),
            Some(" SELECT 1")
        );
        assert_eq!(extent("\u{e9}\u{e9}\u{e9}", 3), None, "the limit may be inside a character");
    }

    proptest! {
        /// Tokens are in order, do not overlap and are not empty, so the lexer terminates.
        #[test]
        fn tokens_are_ordered_and_do_not_overlap(sql in "[ -~\\\\\u{e9}\n]{0,60}") {
            let mut at = 0;
            for token in Lexer::new(&sql) {
                prop_assert!(token.start >= at && !token.text.is_empty());
                at = token.end();
                token.name();
                token.string();
            }
        }
    }

    #[test]
    fn is_blank_ignores_comments_and_semicolons() {
        for text in ["", " \n", ";", " ; -- comment\n /* x */ ;"] {
            assert!(is_blank(text), "{text}");
        }
        assert!(!is_blank("; SELECT 1"));
    }
}
