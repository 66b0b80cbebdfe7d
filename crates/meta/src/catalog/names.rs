//! The rule for names of tenants and users.

use crate::{MetaError, What};

/// As many as PostgreSQL allows; tools lay out their tables for it.
const MAX_NAME_BYTES: usize = 63;

/// Control characters are refused because a name is printed in tables, logs and prompts.
const RULE: &str =
    "a name has 1 to 63 bytes of UTF-8, without control characters (NUL and line breaks among them)";

/// Refuses what breaks the rule. Quotes, slashes, spaces and any letters are welcome.
pub(super) fn check(what: What, name: &str) -> Result<(), MetaError> {
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
    fn the_rule_is_kept() {
        let longest = "x".repeat(63);
        for name in ["a", "O'Hara \"the\" 1st", "héron/鳥", longest.as_str()] {
            assert_eq!(check(What::Tenant, name), Ok(()), "{name}");
        }
        let (long, long_in_bytes) = ("x".repeat(64), "鳥".repeat(22));
        for name in ["", "a\0b", "a\nb", long.as_str(), long_in_bytes.as_str()] {
            assert!(matches!(check(What::User, name), Err(MetaError::InvalidName { .. })), "{name:?}");
        }
    }
}
