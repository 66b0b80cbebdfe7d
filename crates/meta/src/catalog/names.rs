//! Validates the names of tenants, users and tokens.

use crate::{MetaError, ObjectKind};

/// Same limit as PostgreSQL, because tools format their tables for it.
const MAX_NAME_BYTES: usize = 63;

/// Control characters are rejected because names are printed in tables, logs and prompts.
const RULE: &str =
    "names must have 1 to 63 bytes of UTF-8 and no control characters (such as NUL or line breaks)";

/// Rejects an invalid name. Quotes, slashes, spaces and all letters are allowed.
pub(super) fn check(what: ObjectKind, name: &str) -> Result<(), MetaError> {
    let fits = (1..=MAX_NAME_BYTES).contains(&name.len());
    if fits && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(MetaError::InvalidName { what, name: name.chars().take(100).collect(), rule: RULE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_1_to_63_bytes_without_control_characters_are_valid() {
        let longest = "x".repeat(63);
        for name in ["a", "O'Hara \"the\" 1st", "héron/鳥", longest.as_str()] {
            assert_eq!(check(ObjectKind::Tenant, name), Ok(()), "{name}");
        }
        let (long, long_in_bytes) = ("x".repeat(64), "鳥".repeat(22));
        for name in ["", "a\0b", "a\nb", long.as_str(), long_in_bytes.as_str()] {
            assert!(matches!(check(ObjectKind::User, name), Err(MetaError::InvalidName { .. })), "{name:?}");
        }
    }
}
