//! Parameters of a session that continues at another node.

use super::{Rule, Settings, find};

impl Settings {
    /// The values that the client can change, and differ from the global default; then those that
    /// it set when it connected.
    pub(crate) fn save(&self) -> [Vec<(String, String)>; 2] {
        let own = |values: &[(Box<str>, Box<str>)]| {
            let changeable =
                |name: &str| !find(name).is_some_and(|parameter| matches!(parameter.rule, Rule::Fixed));
            let own = values.iter().filter(|(name, _)| changeable(name));
            own.map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        [own(&self.values), own(&self.defaults)]
    }

    /// Like [`Settings::save`], after a commit of the open transaction.
    pub(crate) fn save_committed(&self) -> [Vec<(String, String)>; 2] {
        let mut committed = self.clone();
        committed.end_transaction(true);
        committed.save()
    }

    /// Restores values that were [saved](Settings::save).
    pub(crate) fn restore(&mut self, defaults: &[(String, String)], values: &[(String, String)]) {
        for (name, value) in values {
            self.store(name, Some(value.as_str().into()));
        }
        let defaults = defaults.iter();
        self.defaults = defaults.map(|(name, value)| (name.as_str().into(), value.as_str().into())).collect();
    }

    /// Returns true if a value has changed since the last call.
    pub(crate) fn take_stored(&mut self) -> bool {
        self.stored_in_transaction = false;
        std::mem::take(&mut self.stored)
    }

    /// Returns true if a value has changed since the last call, or that of [`Settings::take_stored`].
    pub(crate) fn take_stored_in_transaction(&mut self) -> bool {
        std::mem::take(&mut self.stored_in_transaction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_parameters_are_those_that_were_saved() {
        let mut first = Settings::default();
        first.set("statement_timeout", Some("5s")).unwrap();
        first.set("TimeZone", Some("Europe/Berlin")).unwrap();
        first.save_as_defaults();
        first.set("TimeZone", Some("UTC")).unwrap();
        first.set("my.x", Some("1")).unwrap();
        first.set_fixed("is_superuser", "on");
        assert!(first.take_stored() && !first.take_stored());
        let [values, defaults] = first.save();
        let mut second = Settings::default();
        second.restore(&defaults, &values);
        for (name, value) in
            [("statement_timeout", "5s"), ("TimeZone", "UTC"), ("my.x", "1"), ("is_superuser", "off")]
        {
            assert_eq!(second.get(name).unwrap(), value, "{name}");
        }
        first.set_in_transaction("my.x", Some("2"), false).unwrap();
        first.set_in_transaction("TimeZone", Some("Asia/Tokyo"), true).unwrap();
        assert!(first.take_stored_in_transaction() && !first.take_stored_in_transaction());
        let [committed, _] = first.save_committed();
        let value = |name: &str| committed.iter().find(|value| value.0 == name).map(|value| value.1.as_str());
        assert_eq!((value("my.x"), value("TimeZone")), (Some("2"), Some("UTC")), "after a commit");
        assert!(first.take_stored(), "the end of the transaction must be told, too");
        second.reset_all();
        assert_eq!(second.get("TimeZone").unwrap(), "Europe/Berlin");
        assert!(second.get("my.x").is_err());
    }
}
