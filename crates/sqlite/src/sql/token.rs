//! Tokenizer for SQLite's SQL, limited to token boundaries and kinds.

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A keyword or a plain name.
    Word,
    /// A name in double quotes, brackets or backticks.
    Quoted,
    /// A string in single quotes, or a blob.
    Text,
    /// A number.
    Number,
    /// `$1`, `?1`.
    Parameter,
    /// Operators, parentheses, commas.
    Symbol,
}

/// A token and its byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// What it is.
    pub kind: Kind,
    /// Its text.
    pub text: &'a str,
    /// Where it starts in the SQL text.
    pub start: usize,
}

impl Token<'_> {
    /// Returns true if the token is this keyword, in any case.
    pub fn is(&self, keyword: &str) -> bool {
        self.kind == Kind::Word && self.text.eq_ignore_ascii_case(keyword)
    }

    /// Returns true if it is this symbol.
    pub fn is_symbol(&self, symbol: &str) -> bool {
        self.kind == Kind::Symbol && self.text == symbol
    }

    /// The name in lower case, or None if the token is not a name.
    pub fn name(&self) -> Option<String> {
        match self.kind {
            Kind::Word => Some(self.text.to_ascii_lowercase()),
            Kind::Quoted => self.text.get(1..self.text.len() - 1).map(str::to_ascii_lowercase),
            _ => None,
        }
    }

    /// The identifier as PostgreSQL reads it: ASCII letters in lower case unless it is quoted, and
    /// doubled quotes as one.
    pub fn identifier(&self) -> Option<String> {
        match self.kind {
            Kind::Word => Some(self.text.to_ascii_lowercase()),
            Kind::Quoted => {
                let (quote, inner) = (self.text.get(..1)?, self.text.get(1..self.text.len() - 1)?);
                // Brackets have no escape.
                Some(if quote == "[" { inner.to_owned() } else { inner.replace(&quote.repeat(2), quote) })
            }
            _ => None,
        }
    }

    /// Where it ends in the SQL text.
    pub fn end(&self) -> usize {
        self.start + self.text.len()
    }
}

/// Iterates over the tokens of a text, skipping comments and white space. An unterminated string
/// extends to the end of the text.
pub fn tokens(sql: &str) -> impl Iterator<Item = Token<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        at = skip_blank(sql, at);
        let rest = sql.get(at..).filter(|rest| !rest.is_empty())?;
        let (kind, length) = scan(rest);
        let token = Token { kind, text: &rest[..length], start: at };
        at += length;
        Some(token)
    })
}

/// The first statement of a text.
pub struct FirstStatement<'a> {
    /// The statement's tokens, without surrounding semicolons.
    pub tokens: Vec<Token<'a>>,
    /// CREATE TRIGGER: its body contains semicolons, so `tokens` holds all tokens to the end of the
    /// text, and SQLite finds the end of the statement.
    pub trigger: bool,
    /// The text after the statement's semicolon.
    pub rest: &'a str,
}

/// Texts of at least this length are scanned twice, so that the token vector is allocated at its
/// exact size.
const LONG_BYTES: usize = 64 << 10;

/// Finds the first statement of `sql` and reads no further than its end. Returns None if the
/// statement is longer than `limit_bytes`; a long text is rejected before its tokens are stored.
pub fn first_statement(sql: &str, limit_bytes: usize) -> Option<FirstStatement<'_>> {
    let mut first = FirstStatement { tokens: Vec::new(), trigger: false, rest: "" };
    if sql.len() >= LONG_BYTES {
        first.tokens.reserve_exact(count_tokens(sql, limit_bytes)?);
    }
    for token in tokens(sql).skip_while(|t| t.is_symbol(";")) {
        if token.is_symbol(";") && !first.trigger {
            first.rest = &sql[token.end()..];
            break;
        }
        first.tokens.push(token);
        first.trigger |= first.tokens.len() <= 4 && first.tokens[0].is("CREATE") && token.is("TRIGGER");
    }
    Some(first)
}

/// Counts the tokens of the first statement, or all remaining tokens if it is a trigger. Returns
/// None if it is longer than `limit_bytes`.
fn count_tokens(sql: &str, limit_bytes: usize) -> Option<usize> {
    let (mut start, mut creates, mut trigger, mut count) = (0, false, false, 0);
    for token in tokens(sql).skip_while(|t| t.is_symbol(";")) {
        if token.is_symbol(";") && !trigger {
            break;
        }
        if count == 0 {
            (start, creates) = (token.start, token.is("CREATE"));
        }
        if token.end() - start > limit_bytes {
            return None;
        }
        count += 1;
        trigger |= count <= 4 && creates && token.is("TRIGGER");
    }
    Some(count)
}

fn skip_blank(sql: &str, mut at: usize) -> usize {
    let bytes = sql.as_bytes();
    loop {
        while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        let rest = &bytes[at..];
        if rest.starts_with(b"--") {
            at += rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            at += rest.windows(2).skip(2).position(|w| w == b"*/").map_or(rest.len(), |i| i + 4);
        } else {
            return at;
        }
    }
}

fn scan(rest: &str) -> (Kind, usize) {
    let bytes = rest.as_bytes();
    match bytes[0] {
        b'\'' => (Kind::Text, quoted(bytes, b'\'')),
        b'"' => (Kind::Quoted, quoted(bytes, b'"')),
        b'`' => (Kind::Quoted, quoted(bytes, b'`')),
        b'[' => (Kind::Quoted, bytes.iter().position(|b| *b == b']').map_or(bytes.len(), |i| i + 1)),
        b'x' | b'X' if bytes.get(1) == Some(&b'\'') => (Kind::Text, 1 + quoted(&bytes[1..], b'\'')),
        b'0'..=b'9' => (Kind::Number, run(bytes, |b| b.is_ascii_alphanumeric() || b == b'.' || b == b'_')),
        b'.' if bytes.get(1).is_some_and(u8::is_ascii_digit) => {
            (Kind::Number, 1 + run(&bytes[1..], |b| b.is_ascii_alphanumeric()))
        }
        b'$' | b'?' | b'@' | b':' if bytes.get(1).is_some_and(|b| b.is_ascii_alphanumeric()) => {
            (Kind::Parameter, 1 + run(&bytes[1..], word))
        }
        b'?' => (Kind::Parameter, 1),
        b if word(b) => (Kind::Word, run(bytes, word)),
        _ => (Kind::Symbol, symbol(bytes)),
    }
}

fn word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b >= 0x80
}

fn run(bytes: &[u8], test: impl Fn(u8) -> bool) -> usize {
    bytes.iter().position(|b| !test(*b)).unwrap_or(bytes.len())
}

/// Length of a quoted token; a doubled quote is an escaped one.
fn quoted(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < bytes.len() {
        if bytes[at] == quote {
            if bytes.get(at + 1) != Some(&quote) {
                return at + 1;
            }
            at += 1;
        }
        at += 1;
    }
    bytes.len()
}

fn symbol(bytes: &[u8]) -> usize {
    const LONG_OPERATORS: [&[u8]; 8] = [b"==", b"<=", b">=", b"<>", b"!=", b"||", b"<<", b">>"];
    if LONG_OPERATORS.iter().any(|d| bytes.starts_with(d)) { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_token_boundaries() {
        let sql = "SELECT a.\"b \"\"c\", 'it''s', x'00', 1.5e3 /* no */ FROM t -- end\n WHERE ü=$12 AND b<>?";
        let found: Vec<_> = tokens(sql).map(|t| t.text).collect();
        let expected = [
            "SELECT",
            "a",
            ".",
            "\"b \"\"c\"",
            ",",
            "'it''s'",
            ",",
            "x'00'",
            ",",
            "1.5e3",
            "FROM",
            "t",
            "WHERE",
            "ü",
            "=",
            "$12",
            "AND",
            "b",
            "<>",
            "?",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn finds_the_first_statement() {
        let texts = |sql| {
            let FirstStatement { tokens, trigger, rest } = first_statement(sql, usize::MAX).unwrap();
            (tokens.iter().map(|t| t.text).collect::<Vec<_>>().join(" "), trigger, rest)
        };
        assert_eq!(texts(" ; ;a ';' b ; c;"), ("a ';' b".into(), false, " c;"));
        assert_eq!(texts("; -- only"), (String::new(), false, ""));
        assert_eq!(
            texts("create temp trigger t x; y; end; z"),
            ("create temp trigger t x ; y ; end ; z".into(), true, "")
        );
    }

    #[test]
    fn long_statement_is_rejected_before_its_tokens_are_stored() {
        let list = format!("SELECT {}1", "1,".repeat(100_000));
        let script = format!("; {list}; {list};");
        let first = first_statement(&script, list.len()).unwrap();
        assert_eq!((first.tokens.len(), first.tokens.capacity()), (200_002, 200_002));
        assert!(first_statement(&script, list.len() - 1).is_none());
        let trigger = format!("CREATE TRIGGER t x; y; END; {list}");
        assert!(first_statement(&trigger, list.len()).is_none());
    }

    #[test]
    fn identifiers_are_folded_as_in_postgres() {
        let names: Vec<_> = tokens("Foo \"Foo\" \u{c4}NDERN \"a\"\"b\" [A]] `x``Y` 'text' 7")
            .map(|token| token.identifier())
            .collect();
        let expected = ["foo", "Foo", "\u{c4}ndern", "a\"b", "A"].map(|name| Some(name.to_owned()));
        assert_eq!(names[..5], expected);
        assert_eq!(names[names.len() - 3..], [Some("x`Y".to_owned()), None, None]);
    }

    /// Checks the tokens of `sql`, and of every text that extends it by up to `more` of
    /// `characters`.
    fn check_tokens(sql: &mut String, characters: &[char], more: usize) {
        let is_blank = |gap: &str| {
            let gap = gap.trim_start();
            gap.is_empty() || gap.starts_with("--") || gap.starts_with("/*")
        };
        let mut end = 0;
        for token in tokens(sql) {
            assert!(is_blank(&sql[end..token.start]), "{sql:?}: no token covers the text before {token:?}");
            assert!(
                !token.text.is_empty() && sql[token.start..].starts_with(token.text),
                "{sql:?}: {token:?}"
            );
            let is_word = token.kind == Kind::Word;
            assert!(
                !is_word || (token.name().is_some() && token.identifier().is_some()),
                "{sql:?}: {token:?}"
            );
            end = token.end();
        }
        assert!(is_blank(&sql[end..]), "{sql:?}: no token covers the end");
        for character in characters.iter().filter(|_| more > 0) {
            sql.push(*character);
            check_tokens(sql, characters, more - 1);
            sql.pop();
        }
    }

    #[test]
    fn tokens_cover_everything_except_blanks_and_comments() {
        let characters =
            ['\'', '"', '[', ']', '`', '/', '*', '-', 'x', '$', ':', '1', '.', '\n', '\u{1F600}'];
        check_tokens(&mut String::new(), &characters, 4);
    }
}
