//! Details of an event: a compact sorted list of names and values. A `serde_json` map would
//! allocate a node of 600 bytes for each of the thousands of events in memory.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// Names and values, sorted by name. Serialized as a JSON object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details(Vec<(Box<str>, Value)>);

impl Details {
    /// Inserts a value, or replaces the value with the same name.
    pub(super) fn insert(&mut self, name: &str, value: Value) {
        match self.0.binary_search_by_key(&name, |(name, _)| name) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => {
                self.0.reserve_exact(1);
                self.0.insert(at, (name.into(), value));
            }
        }
    }

    pub(super) fn retain(&mut self, mut keep: impl FnMut(&str, &Value) -> bool) {
        self.0.retain(|(name, value)| keep(name, value));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Converts the details to a map.
    pub(crate) fn to_map(&self) -> Map<String, Value> {
        self.0.iter().map(|(name, value)| (name.to_string(), value.clone())).collect()
    }
}

impl Serialize for Details {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de> Deserialize<'de> for Details {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map = Map::deserialize(deserializer)?;
        Ok(Details(map.into_iter().map(|(name, value)| (name.into_boxed_str(), value)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_behave_like_a_map() {
        let (mut details, mut map) = (Details::default(), Map::new());
        assert!(details.is_empty());
        for (name, value) in [("role", "bert"), ("database", "shop"), ("role", "anna"), ("times", "3")] {
            details.insert(name, value.into());
            map.insert(name.to_owned(), value.into());
        }
        let json = serde_json::to_string(&map).unwrap();
        assert_eq!((serde_json::to_string(&details).unwrap(), details.to_map()), (json.clone(), map.clone()));
        assert_eq!(serde_json::from_str::<Details>(&json).unwrap().to_map(), map);
        details.retain(|name, _| name == "times");
        assert_eq!(serde_json::to_string(&details).unwrap(), r#"{"times":"3"}"#);
    }
}
