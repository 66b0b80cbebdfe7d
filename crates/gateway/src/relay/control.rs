//! Recognises transaction control in the text of statements, without parsing it. In doubt, a text is
//! taken for one that contains the end of a transaction and more.

/// What a text does to transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// Nothing.
    Plain,
    /// Begins one.
    Begin,
    /// Commits it, and nothing else.
    Commit,
    /// Rolls it back, and nothing else.
    Rollback,
    /// Ends it, and nothing else.
    End,
    /// Possibly ends one before other statements, or begins one after other statements.
    Mixed,
}

impl Control {
    /// What a single statement does.
    pub(super) fn of_statement(sql: &[u8]) -> Control {
        const WORDS: [&str; 6] = ["BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT"];
        let is = |word: &[u8], other: &str| word.eq_ignore_ascii_case(other.as_bytes());
        let count = |other: &str| words(sql).filter(|word| is(word, other)).count();
        let has_comment = [b"--".as_slice(), b"/*"]
            .iter()
            .any(|mark| sql.windows(mark.len()).any(|window| window == *mark));
        let first = words(sql).next().unwrap_or_default().to_ascii_uppercase();
        let first = std::str::from_utf8(&first).unwrap_or_default();
        // The END of a CASE.
        let ends_case = first != "END" && !has_comment && count("END") <= count("CASE");
        let is_control = |word: &[u8]| WORDS.iter().any(|other| is(word, other));
        let controls = words(sql).filter(|word| is_control(word) && !(ends_case && is(word, "END")));
        // Savepoints exist only within a transaction.
        let is_savepoint = first == "ROLLBACK" && count("TO") > 0;
        match (controls.count(), first) {
            (0, _) => Control::Plain,
            (1, _) if is_savepoint => Control::Plain,
            (1, "BEGIN" | "START") => Control::Begin,
            (1, "COMMIT" | "END") if is_plain_commit(sql) => Control::Commit,
            (1, "COMMIT" | "END") => Control::End,
            (1, "ROLLBACK" | "ABORT") => Control::Rollback,
            _ => Control::Mixed,
        }
    }

    /// What the statements of a text do. Semicolons in literals split a statement: its parts are
    /// taken for statements.
    pub(super) fn of_text(sql: &[u8]) -> Control {
        let statements = sql.split(|byte| *byte == b';');
        let statements = statements.filter(|sql| !sql.trim_ascii().is_empty());
        Control::of_sequence(statements.map(Control::of_statement))
    }

    /// What a sequence of statements does.
    pub(super) fn of_sequence(statements: impl Iterator<Item = Control>) -> Control {
        let statements: Vec<Control> = statements.collect();
        let [first, middle @ .., last] = &statements[..] else {
            return statements.first().copied().unwrap_or(Control::Plain);
        };
        let is_plain = |control: &Control| *control == Control::Plain;
        let begins = *first == Control::Begin;
        let ends = matches!(last, Control::Commit | Control::Rollback | Control::End);
        match middle.iter().all(is_plain) && (begins || is_plain(first)) && (ends || is_plain(last)) {
            true if ends => Control::End,
            true if begins => Control::Begin,
            true => Control::Plain,
            false => Control::Mixed,
        }
    }

    /// Returns true if it may end a transaction.
    pub(super) fn may_end(self) -> bool {
        matches!(self, Control::Commit | Control::Rollback | Control::End | Control::Mixed)
    }
}

fn is_plain_commit(sql: &[u8]) -> bool {
    let is_plain = sql.iter().all(|byte| byte.is_ascii_alphabetic() || byte.is_ascii_whitespace());
    let is_noise =
        |word: &[u8]| word.eq_ignore_ascii_case(b"WORK") || word.eq_ignore_ascii_case(b"TRANSACTION");
    let mut rest = words(sql).skip(1);
    is_plain && rest.next().is_none_or(is_noise) && rest.next().is_none()
}

/// The words of a text. Words in literals and comments are words too.
fn words(sql: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || !byte.is_ascii();
    sql.split(move |byte| !is_word(byte)).filter(|word| !word.is_empty())
}

/// Maximum number of portals whose control is known.
const MAX_PORTALS: usize = 64;
/// Maximum size of the name of such a portal.
const MAX_PORTAL_NAME_BYTES: usize = 256;

/// The control of portals by name.
#[derive(Default)]
pub(super) struct Portals {
    controls: Vec<(Box<[u8]>, Control)>,
    bytes: usize,
}

impl Portals {
    /// A statement was bound to a portal.
    pub(super) fn bind(&mut self, portal: &[u8], control: Control) {
        self.controls.retain(|(name, _)| **name != *portal);
        if self.controls.len() == MAX_PORTALS {
            self.controls.clear(); // the execution of an unknown portal may be anything
        }
        if portal.len() <= MAX_PORTAL_NAME_BYTES {
            self.controls.push((portal.into(), control));
        }
        let size = |(name, _): &(Box<[u8]>, Control)| size_of::<(Box<[u8]>, Control)>() + name.len();
        self.bytes = self.controls.iter().map(size).sum();
    }

    /// The size of the names.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What the execution of a portal does. Portals of earlier units are not known.
    pub(super) fn execute(&self, portal: &[u8]) -> Control {
        let found = self.controls.iter().find(|(name, _)| **name == *portal);
        found.map_or(Control::Mixed, |(_, control)| *control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_with_one_transaction_are_recognised() {
        for (sql, expected) in [
            ("", Control::Plain),
            ("SELECT 1; INSERT INTO t VALUES (1)", Control::Plain),
            ("SELECT CASE WHEN a THEN 1 END FROM t; SELECT 2", Control::Plain),
            ("begin", Control::Begin),
            ("BEGIN READ ONLY; SELECT 1;", Control::Begin),
            ("commit work;", Control::Commit),
            ("END", Control::Commit),
            ("BEGIN; INSERT INTO t VALUES (1); COMMIT", Control::End),
            ("INSERT INTO t VALUES (1); COMMIT", Control::End),
            ("ROLLBACK;", Control::Rollback),
            ("INSERT INTO t VALUES (1); ROLLBACK", Control::End),
            ("ROLLBACK; SELECT 1", Control::Mixed),
            ("COMMIT; SELECT 1", Control::Mixed),
            ("SELECT 1; BEGIN", Control::Mixed),
            ("COMMIT AND CHAIN", Control::End),
            ("COMMIT; BEGIN", Control::Mixed),
            ("/* case */ END", Control::Mixed),
            ("SELECT 1; /* case */ END; SELECT 1", Control::Mixed),
            ("SAVEPOINT a; RELEASE a", Control::Plain),
            ("ROLLBACK TO a; SELECT 1", Control::Plain),
            ("ROLLBACK TO SAVEPOINT a", Control::Plain),
        ] {
            assert_eq!(Control::of_text(sql.as_bytes()), expected, "{sql}");
        }
    }
}
