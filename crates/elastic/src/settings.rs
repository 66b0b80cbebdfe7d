//! The settings of the controller. They are stored as text by name, and hold for the whole cluster.
//!
//! A name that is not set has its default. [`ControlSettings::read`] ignores stored values that it
//! cannot use, because a newer version may have written them; [`check`] refuses them before they are
//! stored.

use std::collections::BTreeMap;
use std::time::Duration;

use fulmar_control::planners::{self, PLANNERS};
use fulmar_control::policy::when::RULES;
use fulmar_control::policy::{self, Window};
use fulmar_meta::Unit;

/// What the controller may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Nothing: there is no controller.
    #[default]
    Off,
    /// It decides, and records its decisions.
    Advise,
    /// It carries its decisions out.
    On,
}

impl Mode {
    const ALL: [Mode; 3] = [Mode::Off, Mode::Advise, Mode::On];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Advise => "advise",
            Mode::On => "on",
        }
    }
}

/// The settings of the controller.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlSettings {
    /// What it may do.
    pub mode: Mode,
    /// The rule for the number of nodes, by name.
    pub rule: &'static str,
    /// Thresholds and limits of the policy.
    pub policy: policy::Settings,
    /// Time from one round to the next.
    pub round: Duration,
    /// Time between two values of the forecast series.
    pub step: Duration,
    /// The number of partitions that are moved concurrently from and to each node.
    pub moves: usize,
    /// How long a node that was added may take until it serves.
    pub start_timeout: Duration,
    /// How long one call of the provisioner may take.
    pub provisioner_timeout: Duration,
    /// How long a node must be dead before it is replaced.
    pub replace_after: Duration,
    /// Nodes that are added have this name and a number.
    pub base_name: String,
}

impl Default for ControlSettings {
    fn default() -> ControlSettings {
        ControlSettings {
            mode: Mode::Off,
            rule: "planned",
            policy: policy::Settings { max_nodes: 100, ..policy::Settings::default() },
            round: Duration::from_secs(5),
            step: Duration::from_secs(60),
            moves: 4,
            start_timeout: Duration::from_secs(300),
            provisioner_timeout: Duration::from_secs(60),
            replace_after: Duration::from_secs(300),
            base_name: "auto".to_owned(),
        }
    }
}

/// A value that is refused: the rule that it breaks.
type Refusal = String;

/// A setting: how it is parsed and shown.
struct Definition {
    name: &'static str,
    about: &'static str,
    set: fn(&mut ControlSettings, &str) -> Result<(), Refusal>,
    show: fn(&ControlSettings) -> String,
}

const DEFINITIONS: &[Definition] = &[
    Definition {
        name: "mode",
        about: "off, advise (decide and record), on (carry decisions out)",
        set: |settings, text| {
            let found = Mode::ALL.into_iter().find(|mode| mode.name() == text);
            settings.mode = found.ok_or("The value must be off, advise or on.")?;
            Ok(())
        },
        show: |settings| settings.mode.name().to_owned(),
    },
    Definition {
        name: "policy",
        about: "Rule for the number of nodes",
        set: |settings, text| {
            let found = RULES.into_iter().find(|rule| *rule == text);
            settings.rule = found.ok_or_else(|| one_of(RULES))?;
            Ok(())
        },
        show: |settings| settings.rule.to_owned(),
    },
    Definition {
        name: "planner",
        about: "Planner of moves",
        set: |settings, text| {
            let found = planners::planner(text);
            settings.policy.planner =
                found.ok_or_else(|| one_of(PLANNERS.map(planners::Planner::name)))?.name();
            Ok(())
        },
        show: |settings| settings.policy.planner.to_owned(),
    },
    Definition {
        name: "min_nodes",
        about: "Smallest number of nodes",
        set: |settings, text| put(&mut settings.policy.min_nodes, count(text, 1, 10_000)),
        show: |settings| settings.policy.min_nodes.to_string(),
    },
    Definition {
        name: "max_nodes",
        about: "Largest number of nodes",
        set: |settings, text| put(&mut settings.policy.max_nodes, count(text, 1, 10_000)),
        show: |settings| settings.policy.max_nodes.to_string(),
    },
    Definition {
        name: "high",
        about: "A node above this utilisation is overloaded",
        set: |settings, text| put(&mut settings.policy.high, share(text)),
        show: |settings| settings.policy.high.to_string(),
    },
    Definition {
        name: "low",
        about: "Below this mean utilisation nodes are removed",
        set: |settings, text| put(&mut settings.policy.low, share(text)),
        show: |settings| settings.policy.low.to_string(),
    },
    Definition {
        name: "target",
        about: "Mean utilisation that nodes are added or removed for",
        set: |settings, text| put(&mut settings.policy.target, share(text)),
        show: |settings| settings.policy.target.to_string(),
    },
    Definition {
        name: "hold_up",
        about: "How long a threshold must be exceeded before nodes are added",
        set: |settings, text| {
            put(&mut settings.policy.hold_up_s, time(text, 0).map(|time| time.as_secs_f64()))
        },
        show: |settings| shown_s(settings.policy.hold_up_s),
    },
    Definition {
        name: "hold_down",
        about: "How long the load must be low before nodes are removed",
        set: |settings, text| {
            put(&mut settings.policy.hold_down_s, time(text, 0).map(|time| time.as_secs_f64()))
        },
        show: |settings| shown_s(settings.policy.hold_down_s),
    },
    Definition {
        name: "cool_down",
        about: "A tenant is not moved twice within this time, unless its node leaves",
        set: |settings, text| {
            put(&mut settings.policy.planning.cool_down_s, time(text, 0).map(|time| time.as_secs_f64()))
        },
        show: |settings| shown_s(settings.policy.planning.cool_down_s),
    },
    Definition {
        name: "maintenance",
        about: "When nodes may be removed, in UTC: HH:MM-HH:MM, or always",
        set: |settings, text| put(&mut settings.policy.maintenance, window(text)),
        show: |settings| settings.policy.maintenance.map_or_else(|| ALWAYS.to_owned(), shown_window),
    },
    Definition {
        name: "round",
        about: "Time between two rounds",
        set: |settings, text| put(&mut settings.round, time(text, 100)),
        show: |settings| shown(settings.round),
    },
    Definition {
        name: "step",
        about: "Time between two values of the forecast series",
        set: |settings, text| put(&mut settings.step, time(text, 100)),
        show: |settings| shown(settings.step),
    },
    Definition {
        name: "moves",
        about: "Number of tenants that are moved concurrently from and to each node",
        set: |settings, text| put(&mut settings.moves, count(text, 1, 64)),
        show: |settings| settings.moves.to_string(),
    },
    Definition {
        name: "node_start",
        about: "What a node usually takes until it serves: the forecast looks this far ahead",
        set: |settings, text| {
            put(&mut settings.policy.node_start_s, time(text, 100).map(|time| time.as_secs_f64()))
        },
        show: |settings| shown_s(settings.policy.node_start_s),
    },
    Definition {
        name: "start_timeout",
        about: "A node that was added and does not serve by then is removed again",
        set: |settings, text| put(&mut settings.start_timeout, time(text, 100)),
        show: |settings| shown(settings.start_timeout),
    },
    Definition {
        name: "provisioner_timeout",
        about: "How long one call of the provisioner may take",
        set: |settings, text| put(&mut settings.provisioner_timeout, time(text, 100)),
        show: |settings| shown(settings.provisioner_timeout),
    },
    Definition {
        name: "replace_after",
        about: "A node that is dead for this long is replaced",
        set: |settings, text| put(&mut settings.replace_after, time(text, 0)),
        show: |settings| shown(settings.replace_after),
    },
    Definition {
        name: "base_name",
        about: "Nodes that are added have this name and a number",
        set: |settings, text| {
            let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            if text.is_empty() || text.len() > 40 || !text.bytes().all(is_allowed) {
                return Err("The value must be 1 to 40 of a-z, 0-9 and \"-\".".to_owned());
            }
            text.clone_into(&mut settings.base_name);
            Ok(())
        },
        show: |settings| settings.base_name.clone(),
    },
];

fn put<T>(place: &mut T, value: Result<T, Refusal>) -> Result<(), Refusal> {
    *place = value?;
    Ok(())
}

/// The value of `maintenance` for no window.
const ALWAYS: &str = "always";

fn one_of<const N: usize>(names: [&str; N]) -> Refusal {
    format!("The value must be one of {}.", names.join(", "))
}

fn count(text: &str, min: usize, max: usize) -> Result<usize, Refusal> {
    let parsed = text.parse().ok().filter(|value| (min..=max).contains(value));
    parsed.ok_or_else(|| format!("The value must be a whole number from {min} to {max}."))
}

/// A share of the capacity, from 0.01 to 1; `77%` is 0.77.
fn share(text: &str) -> Result<f64, Refusal> {
    let parsed = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    let parsed = parsed.ok().filter(|value| (0.01..=1.0).contains(value));
    parsed.ok_or_else(|| "The value must be a share from 0.01 to 1, such as 0.77 or 77%.".to_owned())
}

/// A time of at least `min_ms` and at most 30 days.
fn time(text: &str, min_ms: u64) -> Result<Duration, Refusal> {
    const MAX_MS: u64 = 30 * 86_400_000;
    let parsed = Unit::Milliseconds.parse(text).filter(|ms| (min_ms..=MAX_MS).contains(ms));
    parsed.map(Duration::from_millis).ok_or_else(|| {
        let (min, max) = (Unit::Milliseconds.write(min_ms), Unit::Milliseconds.write(MAX_MS));
        format!("The value must be {}, from {min} to {max}.", Unit::Milliseconds.rule())
    })
}

fn shown(time: Duration) -> String {
    Unit::Milliseconds.write(time.as_millis() as u64)
}

fn shown_s(seconds: f64) -> String {
    shown(Duration::from_secs_f64(seconds))
}

fn window(text: &str) -> Result<Option<Window>, Refusal> {
    if text == ALWAYS {
        return Ok(None);
    }
    let minutes = |text: &str| {
        let (hour, minute) = text.trim().split_once(':')?;
        let (hour, minute) = (hour.parse::<u32>().ok()?, minute.parse::<u32>().ok()?);
        (hour < 24 && minute < 60).then_some(f64::from(hour * 60 + minute))
    };
    let parsed = text.split_once('-').and_then(|(from, to)| Some((minutes(from)?, minutes(to)?)));
    let (from, to) = parsed
        .filter(|(from, to)| from != to)
        .ok_or("The value must be a time of day, in UTC, such as 22:00-04:00, or always.")?;
    Ok(Some(Window { from_s: from * 60.0, to_s: to * 60.0 }))
}

fn shown_window(window: Window) -> String {
    let time = |seconds: f64| {
        let minutes = (seconds / 60.0) as u32;
        format!("{:02}:{:02}", minutes / 60, minutes % 60)
    };
    format!("{}-{}", time(window.from_s), time(window.to_s))
}

/// Why a setting was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// There is no such setting.
    #[error("unrecognized configuration parameter \"control.{name}\"")]
    Unknown {
        /// The name that was given.
        name: String,
    },
    /// The value is not allowed.
    #[error("invalid value for parameter \"control.{name}\": \"{value}\"")]
    Invalid {
        /// The setting.
        name: &'static str,
        /// The value that was given.
        value: String,
        /// The rule that it breaks.
        rule: String,
    },
}

impl SettingError {
    /// What can be done.
    pub fn remedy(&self) -> String {
        match self {
            SettingError::Unknown { .. } => {
                let names: Vec<&str> = DEFINITIONS.iter().map(|definition| definition.name).collect();
                format!("The settings are {}.", names.join(", "))
            }
            SettingError::Invalid { rule, .. } => rule.clone(),
        }
    }
}

/// A setting as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownSetting {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Its default.
    pub default: String,
    /// What it is for.
    pub about: &'static str,
}

/// Checks a new value of a setting, together with the values of the others.
pub fn check(name: &str, value: &str, others: &BTreeMap<String, String>) -> Result<(), SettingError> {
    let definition = find(name)?;
    let invalid = |rule: String| SettingError::Invalid {
        name: definition.name,
        value: value.chars().take(100).collect(),
        rule,
    };
    let mut settings = ControlSettings::read(others);
    (definition.set)(&mut settings, value).map_err(invalid)?;
    check_together(&settings).map_err(invalid)
}

/// Checks that a setting can have its default, together with the values of the others.
pub fn check_reset(name: &str, others: &BTreeMap<String, String>) -> Result<(), SettingError> {
    let definition = find(name)?;
    let mut values = others.clone();
    values.remove(name);
    let settings = ControlSettings::read(&values);
    let value = (definition.show)(&settings);
    check_together(&settings).map_err(|rule| SettingError::Invalid { name: definition.name, value, rule })
}

/// Checks the values that depend on each other.
fn check_together(settings: &ControlSettings) -> Result<(), Refusal> {
    let policy = &settings.policy;
    let (low, target, high) = (policy.low, policy.target, policy.high);
    if !(low < target && target <= high) {
        return Err(format!(
            "low < target <= high must hold; it would be {low} < {target} <= {high}. Change the others first."
        ));
    }
    let (min, max) = (policy.min_nodes, policy.max_nodes);
    match min > max {
        true => Err(format!("min_nodes ({min}) must not exceed max_nodes ({max}).")),
        false => Ok(()),
    }
}

fn find(name: &str) -> Result<&'static Definition, SettingError> {
    let found = DEFINITIONS.iter().find(|definition| definition.name == name);
    found.ok_or_else(|| SettingError::Unknown { name: name.chars().take(100).collect() })
}

impl ControlSettings {
    /// The settings with these stored values.
    pub fn read(values: &BTreeMap<String, String>) -> ControlSettings {
        let mut settings = ControlSettings::default();
        for definition in DEFINITIONS {
            let Some(value) = values.get(definition.name) else { continue };
            let mut next = settings.clone();
            if (definition.set)(&mut next, value).is_ok() {
                settings = next;
            }
        }
        settings
    }

    /// All settings, as they are shown.
    pub fn shown(&self) -> Vec<ShownSetting> {
        let default = ControlSettings::default();
        let show = |definition: &Definition| ShownSetting {
            name: definition.name,
            value: (definition.show)(self),
            default: (definition.show)(&default),
            about: definition.about,
        };
        DEFINITIONS.iter().map(show).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(values: &[(&str, &str)]) -> BTreeMap<String, String> {
        values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_shown_can_be_set() {
        for ShownSetting { name, value, default, .. } in ControlSettings::default().shown() {
            assert_eq!(value, default, "{name}");
            assert_eq!(check(name, &value, &BTreeMap::new()), Ok(()), "{name} = {value}");
            let read = ControlSettings::read(&values(&[(name, &value)]));
            assert_eq!(read, ControlSettings::default(), "{name} = {value}");
        }
    }

    #[test]
    fn values_are_parsed_and_checked() {
        let set = [
            ("mode", "on"),
            ("policy", "thresholds"),
            ("high", "80%"),
            ("hold_up", "1.5s"),
            ("maintenance", "22:30-04:00"),
            ("max_nodes", "7"),
        ];
        for (name, value) in set {
            assert_eq!(check(name, value, &BTreeMap::new()), Ok(()), "{name} = {value}");
        }
        let read = ControlSettings::read(&values(&set));
        assert_eq!((read.mode, read.rule, read.policy.max_nodes), (Mode::On, "thresholds", 7));
        assert_eq!((read.policy.high, read.policy.hold_up_s), (0.8, 1.5));
        let window = Window { from_s: 81_000.0, to_s: 14_400.0 };
        assert_eq!(read.policy.maintenance, Some(window));
        for (name, value) in [
            ("mode", "maybe"),
            ("policy", "none"),
            ("planner", "none"),
            ("high", "0"),
            ("high", "1.1"),
            ("high", "NaN"),
            ("hold_up", "1 year"),
            ("round", "1ms"),
            ("maintenance", "24:00-01:00"),
            ("maintenance", "01:00-01:00"),
            ("min_nodes", "0"),
            ("base_name", "../n"),
            ("base_name", ""),
        ] {
            let refused = check(name, value, &BTreeMap::new());
            assert!(matches!(refused, Err(SettingError::Invalid { .. })), "{name} = {value}");
            // A newer version may have stored it.
            assert_eq!(ControlSettings::read(&values(&[(name, value)])), ControlSettings::default());
        }
        let unknown = check("colour", "red", &BTreeMap::new()).unwrap_err();
        assert!(unknown.remedy().contains("mode, policy, planner"), "{}", unknown.remedy());
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let refused = check("low", "0.75", &BTreeMap::new()).unwrap_err();
        assert!(refused.remedy().contains("0.75 < 0.72"), "{}", refused.remedy());
        assert_eq!(check("low", "0.75", &values(&[("high", "0.9"), ("target", "0.8")])), Ok(()));
        let refused = check("min_nodes", "5", &values(&[("max_nodes", "4")])).unwrap_err();
        assert!(refused.remedy().contains("must not exceed"), "{}", refused.remedy());
        // Also if one of them is reset.
        let set = values(&[("high", "0.9"), ("target", "0.85"), ("min_nodes", "200"), ("max_nodes", "300")]);
        let refused = check_reset("high", &set).unwrap_err();
        assert!(refused.to_string().contains("\"control.high\": \"0.77\""), "{refused}");
        assert!(refused.remedy().contains("0.85 <= 0.77"), "{}", refused.remedy());
        assert!(check_reset("max_nodes", &set).unwrap_err().remedy().contains("must not exceed"));
        assert_eq!((check_reset("target", &set), check_reset("mode", &set)), (Ok(()), Ok(())));
        assert!(matches!(check_reset("colour", &set), Err(SettingError::Unknown { .. })));
    }
}
