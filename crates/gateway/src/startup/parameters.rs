//! The parameters of a session at its start.

use std::collections::BTreeMap;

use fulmar_engine::{Error, sqlstate};

use crate::Result;
use crate::identity::Identity;
use crate::settings::Settings;

/// The read-only parameters that describe the session, and the bounds of the others.
pub(crate) fn fixed_settings(identity: &Identity, reads_beside: bool) -> Settings {
    let mut settings = Settings::default();
    settings.set_bounds(&identity.limits, identity.access);
    settings.set_fixed("is_superuser", if identity.superuser { "on" } else { "off" });
    settings.set_fixed("session_authorization", &identity.user);
    if reads_beside {
        settings.set_fixed("in_hot_standby", "on");
        settings.set_fixed("transaction_read_only", "on");
    }
    settings
}

/// Adds the parameters of the startup packet to `settings`.
pub(super) fn settings(parameters: &BTreeMap<String, String>, mut settings: Settings) -> Result<Settings> {
    for (name, value) in parameters {
        match name.as_str() {
            "user" | "database" => {}
            "replication" if matches!(value.as_str(), "false" | "off" | "no" | "0") => {}
            "replication" => {
                return Err(Error::new(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    "replication connections are not supported",
                ));
            }
            "options" => {
                for (name, value) in options(value)? {
                    settings.set(&name, Some(&value))?;
                }
            }
            name if name.starts_with("_pq_.") => {}
            name => settings.set(name, Some(value))?,
        }
    }
    settings.save_as_defaults();
    Ok(settings)
}

/// Parses command-line options: `-c name=value --name=value`. A backslash escapes a space.
fn options(text: &str) -> Result<Vec<(String, String)>> {
    let mut words: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => word.extend(characters.next()),
            ' ' | '\t' | '\n' => words.push(std::mem::take(&mut word)),
            other => word.push(other),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    let mut options = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let setting =
            match word.strip_prefix("--").or_else(|| word.strip_prefix("-c").filter(|rest| !rest.is_empty()))
            {
                Some(setting) => Some(setting.to_owned()),
                None if word == "-c" => words.next(),
                None => None,
            };
        let setting = setting.as_deref().and_then(|setting| setting.split_once('='));
        let (name, value) = setting.ok_or_else(|| {
            Error::new(sqlstate::INVALID_PARAMETER_VALUE, format!("invalid command-line argument: {word}"))
                .hint("Use -c name=value in the connection parameter \"options\".")
        })?;
        options.push((name.replace('-', "_"), value.to_owned()));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_as_libpq_passes_them() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let parsed = options("-c statement_timeout=5s  -capp.a=x\\ y --extra-float-digits=3").unwrap();
        let expected =
            [pair("statement_timeout", "5s"), pair("app.a", "x y"), pair("extra_float_digits", "3")];
        assert_eq!(parsed, expected);
        assert!(options("-c").is_err());
        assert!(options("-B 5").is_err());
    }

    #[test]
    fn startup_parameters_are_applied_and_checked() {
        let map = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .collect::<BTreeMap<_, _>>()
        };
        let parameters = map(&[("user", "anna"), ("application_name", "psql"), ("client_encoding", "UTF8")]);
        let settings = settings(&parameters, Settings::default()).unwrap();
        assert_eq!(settings.get("application_name").unwrap(), "psql");
        let refused = super::settings(&map(&[("nonsense", "1")]), Settings::default());
        assert_eq!(refused.err().map(|error| error.state()), Some("42704"));
        assert!(super::settings(&map(&[("replication", "database")]), Settings::default()).is_err());
    }
}
