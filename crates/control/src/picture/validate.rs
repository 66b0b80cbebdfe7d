//! The rules of a picture. Planners rely on them: finite loads, known owners, unique names.

use std::collections::HashSet;

use super::{Picture, Piece};

/// The sum of the pieces may exceed the partition's load by this share: both are measured.
const ROUNDING: f64 = 1e-6;

/// The minimum capacity: a millionth of a CPU.
const MIN_CAPACITY: f64 = 1e-6;

/// The maximum load, capacity and time: sums of a million of them are still exact enough.
const MAX_QUANTITY: f64 = 1e12;

/// An error in a picture.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The text is no JSON, or has unknown or missing fields.
    #[error("the picture is not valid JSON of a cluster: {0}")]
    Json(#[from] serde_json::Error),
    /// The picture has no nodes.
    #[error("the picture has no nodes; list at least one in \"nodes\"")]
    NoNodes,
    /// Two entries have the same name.
    #[error("{what} \"{name}\" is listed twice; names must be unique")]
    Duplicate {
        /// The kind of entry.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A number is negative, infinite, or otherwise out of range.
    #[error("{what} \"{name}\": {field} is {value}, but must be {rule}")]
    OutOfRange {
        /// The kind of entry.
        what: &'static str,
        /// Its name.
        name: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// An owner is not among the nodes.
    #[error("{what} \"{name}\" is owned by node \"{node}\", which is not in \"nodes\"")]
    UnknownNode {
        /// The kind of entry.
        what: &'static str,
        /// Its name.
        name: String,
        /// The unknown node.
        node: String,
    },
    /// A hot key was extracted from a block that the partition does not have.
    #[error("hot key \"{name}\" of partition \"{partition}\": the partition has no block \"{block}\"")]
    UnknownBlock {
        /// The partition.
        partition: String,
        /// The hot key.
        name: String,
        /// The unknown block.
        block: String,
    },
    /// The pieces of a partition are larger than the partition.
    #[error(
        "partition \"{name}\": the {field} of its hot keys and blocks add up to {pieces}, more than the \
         partition's {whole}; a partition's {field} must include its pieces'"
    )]
    PiecesExceedPartition {
        /// The partition.
        name: String,
        /// The quantity.
        field: &'static str,
        /// The sum over the pieces.
        pieces: f64,
        /// The partition's own value.
        whole: f64,
    },
}

fn in_range(
    what: &'static str,
    name: &str,
    field: &'static str,
    value: f64,
    is_valid: impl Fn(f64) -> bool,
    rule: &'static str,
) -> Result<(), PictureError> {
    if value.abs() <= MAX_QUANTITY && is_valid(value) {
        return Ok(());
    }
    Err(PictureError::OutOfRange { what, name: name.to_owned(), field, value, rule })
}

fn unique<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), PictureError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(PictureError::Duplicate { what, name: name.to_owned() });
        }
    }
    Ok(())
}

const NOT_NEGATIVE: &str = "between 0 and 1e12";
const POSITIVE: &str = "above 0 and at most 1e12";
const CAPACITY: &str = "between 1e-6 and 1e12";

impl Picture {
    /// Checks the rules that the planners rely on.
    pub fn validate(&self) -> Result<(), PictureError> {
        if self.nodes.is_empty() {
            return Err(PictureError::NoNodes);
        }
        in_range("picture", "", "at_s", self.at_s, f64::is_finite, "a finite time")?;
        unique("node", self.nodes.iter().map(|node| node.name.as_str()))?;
        unique("partition", self.partitions.iter().map(|partition| partition.name.as_str()))?;
        for node in &self.nodes {
            in_range("node", &node.name, "capacity", node.capacity, |value| value >= MIN_CAPACITY, CAPACITY)?;
        }
        let nodes: HashSet<&str> = self.nodes.iter().map(|node| node.name.as_str()).collect();
        let known = |what, name: &str, node: &str| match nodes.contains(node) {
            true => Ok(()),
            false => Err(PictureError::UnknownNode { what, name: name.to_owned(), node: node.to_owned() }),
        };
        for partition in &self.partitions {
            let name = &partition.name;
            known("partition", name, &partition.owner)?;
            in_range("partition", name, "load", partition.load, |value| value >= 0.0, NOT_NEGATIVE)?;
            for (field, value) in
                [("latency_ms", partition.latency_ms), ("objective_ms", partition.objective_ms)]
            {
                in_range("partition", name, field, value.unwrap_or(1.0), |value| value > 0.0, POSITIVE)?;
            }
            let moved_at = partition.moved_at_s.unwrap_or(0.0);
            in_range("partition", name, "moved_at_s", moved_at, f64::is_finite, "a finite time")?;
            for (what, pieces) in [("hot key", &partition.hot_keys), ("block", &partition.blocks)] {
                unique(what, pieces.iter().map(|piece| piece.name.as_str()))?;
                for piece in pieces {
                    in_range(what, &piece.name, "load", piece.load, |value| value >= 0.0, NOT_NEGATIVE)?;
                    piece.owner.as_deref().map_or(Ok(()), |node| known(what, &piece.name, node))?;
                }
            }
            let blocks: HashSet<&str> = partition.blocks.iter().map(|block| block.name.as_str()).collect();
            for key in &partition.hot_keys {
                if let Some(block) = key.block.as_ref().filter(|block| !blocks.contains(block.as_str())) {
                    let (partition, name) = (name.clone(), key.name.clone());
                    return Err(PictureError::UnknownBlock { partition, name, block: block.clone() });
                }
            }
            let sum = |value: fn(&Piece) -> f64| partition.pieces().map(value).sum::<f64>();
            for (field, pieces, whole) in [
                ("load", sum(|piece| piece.load), partition.load),
                ("bytes", sum(|piece| piece.bytes as f64), partition.bytes as f64),
                ("memory", sum(|piece| piece.memory as f64), partition.memory as f64),
            ] {
                if pieces > whole * (1.0 + ROUNDING) + ROUNDING {
                    let name = name.clone();
                    return Err(PictureError::PiecesExceedPartition { name, field, pieces, whole });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::{Node, Partition};

    fn error(partition: &str) -> String {
        let nodes = r#"[{"name": "n1", "capacity": 1}, {"name": "n2", "capacity": 1}]"#;
        let text = format!(r#"{{"nodes": {nodes}, "partitions": [{partition}]}}"#);
        Picture::from_json(&text).expect_err("the picture breaks a rule").to_string()
    }

    #[test]
    fn errors_name_the_entry_and_the_rule() {
        let unknown = error(r#"{"name": "shop", "owner": "n3", "load": 1}"#);
        assert_eq!(unknown, "partition \"shop\" is owned by node \"n3\", which is not in \"nodes\"");
        let negative = error(r#"{"name": "shop", "owner": "n1", "load": -1}"#);
        assert_eq!(negative, "partition \"shop\": load is -1, but must be between 0 and 1e12");
        let pieces = r#"{"name": "a", "owner": "n1", "load": 1, "hot_keys": [{"name": "k", "load": 2}]}"#;
        assert!(error(pieces).contains("the load of its hot keys and blocks add up to 2, more than"));
        let twice = r#"{"name": "a", "owner": "n1", "load": 1}, {"name": "a", "owner": "n2", "load": 1}"#;
        assert_eq!(error(twice), "partition \"a\" is listed twice; names must be unique");
        assert!(error(r#"{"name": "a", "owner": "n1", "load": 1, "lod": 1}"#).contains("unknown field"));
        assert!(matches!(Picture::default().validate(), Err(PictureError::NoNodes)));
        let infinite = Picture { nodes: vec![Node::new("n", f64::INFINITY)], ..Picture::default() };
        assert!(infinite.validate().is_err(), "an infinite capacity must be rejected");
    }

    #[test]
    fn a_picture_survives_a_round_trip() {
        let mut picture = Picture { nodes: vec![Node::new("n1", 2.0)], ..Picture::default() };
        picture.partitions.push(Partition { bytes: 7, ..Partition::new("shop", "n1", 0.5) });
        let text = serde_json::to_string(&picture).expect("a picture can be written");
        assert_eq!(Picture::from_json(&text).expect("what was written is valid"), picture);
    }
}
