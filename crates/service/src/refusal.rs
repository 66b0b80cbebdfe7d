//! Why a partition refused a request.

use fulmar_engine::{Error, sqlstate};

/// Why a partition refused a request.
#[derive(Debug)]
pub enum Refusal {
    /// The statement failed with this error.
    Failed(Error),
    /// Another node owns the partition. The request has had no effect.
    OwnedElsewhere {
        /// The id of the node that owns the partition.
        node: u64,
    },
    /// The partition changes its owner now. The request has had no effect.
    Moving,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Failed(error)
    }
}

impl Refusal {
    /// The error for a client whose request cannot be sent to the owner or repeated.
    pub fn into_error(self) -> Error {
        match self {
            Refusal::Failed(error) => error,
            Refusal::OwnedElsewhere { node } => {
                Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database is on another node")
                    .detail(format!("Node {node} owns the database. The statement was not executed."))
                    .hint("Connect to that node.")
            }
            Refusal::Moving => {
                Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database is being moved to another node")
                    .detail("The statement was not executed.")
                    .hint("Retry the statement.")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_partition_are_errors_that_can_be_retried() {
        for refusal in [Refusal::OwnedElsewhere { node: 7 }, Refusal::Moving] {
            let error = refusal.into_error();
            assert_eq!(error.state(), sqlstate::CANNOT_CONNECT_NOW);
            assert!(error.get_detail().is_some_and(|detail| detail.contains("was not executed")));
        }
        let error = Refusal::from(Error::new(sqlstate::SYNTAX_ERROR, "syntax error")).into_error();
        assert_eq!((error.state(), error.message()), (sqlstate::SYNTAX_ERROR, "syntax error"));
    }
}
