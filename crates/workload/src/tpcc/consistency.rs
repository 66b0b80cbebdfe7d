//! The consistency conditions 1 to 4 of the specification (clause 3.3.2), checked for the whole
//! database.

use crate::client::Client;
use crate::conditions::{self, Condition};

const CONDITIONS: [Condition; 4] = [
    Condition {
        what: "1 (w_ytd is the sum of d_ytd of the districts)",
        violations: "SELECT w_id, w_ytd, total FROM warehouse LEFT JOIN \
             (SELECT d_w_id, sum(d_ytd) AS total FROM district GROUP BY d_w_id) AS sums ON d_w_id = w_id \
             WHERE total IS NULL OR w_ytd <> total LIMIT 5",
    },
    Condition {
        what: "2 (d_next_o_id - 1 is the newest order and the newest open order)",
        violations: "SELECT d_w_id, d_id, d_next_o_id, newest, newest_open FROM district LEFT JOIN \
             (SELECT o_w_id, o_d_id, max(o_id) AS newest FROM orders GROUP BY o_w_id, o_d_id) AS o \
             ON o_w_id = d_w_id AND o_d_id = d_id LEFT JOIN \
             (SELECT no_w_id, no_d_id, max(no_o_id) AS newest_open FROM new_order GROUP BY no_w_id, no_d_id) AS n \
             ON no_w_id = d_w_id AND no_d_id = d_id \
             WHERE newest IS NULL OR d_next_o_id - 1 <> newest OR d_next_o_id - 1 <> newest_open LIMIT 5",
    },
    Condition {
        what: "3 (open orders have consecutive numbers)",
        violations: "SELECT no_w_id, no_d_id, min(no_o_id), max(no_o_id), count(*) FROM new_order \
             GROUP BY no_w_id, no_d_id HAVING max(no_o_id) - min(no_o_id) + 1 <> count(*) LIMIT 5",
    },
    Condition {
        what: "4 (the sum of o_ol_cnt of a district is its number of order lines)",
        violations: "SELECT d_w_id, d_id, expected, counted FROM district LEFT JOIN \
             (SELECT o_w_id, o_d_id, sum(o_ol_cnt) AS expected FROM orders \
             GROUP BY o_w_id, o_d_id) AS o \
             ON o_w_id = d_w_id AND o_d_id = d_id LEFT JOIN \
             (SELECT ol_w_id, ol_d_id, count(*) AS counted FROM order_line GROUP BY ol_w_id, ol_d_id) AS l \
             ON ol_w_id = d_w_id AND ol_d_id = d_id \
             WHERE expected IS NULL OR counted IS NULL OR expected <> counted LIMIT 5",
    },
];

pub(super) async fn check(client: &mut Client) -> anyhow::Result<()> {
    conditions::check(client, "TPC-C", &CONDITIONS).await
}
