//! The tables of TATP, and the prepared statements of a connection.
//!
//! ```text
//! subscriber         s_id | sub_nbr (the number as 15 digits) | bit_1.. | hex_1.. | byte2_1..
//!                         | msc_location | vlr_location
//!   access_info        s_id, ai_type (1-4) | data1 .. data4
//!   special_facility   s_id, sf_type (1-4) | is_active | error_cntrl | data_a | data_b
//!     call_forwarding    s_id, sf_type, start_time (0, 8, 16) | end_time | numberx
//! ```

use crate::client::{Client, Error, Statement, Type};

/// Number of bits, of hexadecimal digits and of bytes per subscriber.
pub(super) const FLAGS: usize = 10;

/// The tables in the order in which they are loaded, parents first.
pub(super) const TABLES: [&str; 4] = ["subscriber", "access_info", "special_facility", "call_forwarding"];

pub(super) async fn create(client: &mut Client) -> Result<(), Error> {
    let flags =
        |name: &str| (1..=FLAGS).map(|n| format!("{name}_{n} INTEGER NOT NULL, ")).collect::<String>();
    let tables = [
        format!(
            "CREATE TABLE IF NOT EXISTS subscriber (s_id INTEGER PRIMARY KEY, sub_nbr VARCHAR(15) NOT NULL UNIQUE, \
             {}{}{}msc_location INTEGER NOT NULL, vlr_location INTEGER NOT NULL)",
            flags("bit"),
            flags("hex"),
            flags("byte2")
        ),
        "CREATE TABLE IF NOT EXISTS access_info (s_id INTEGER NOT NULL REFERENCES subscriber (s_id), \
         ai_type INTEGER NOT NULL, data1 INTEGER NOT NULL, data2 INTEGER NOT NULL, data3 VARCHAR(3) NOT NULL, \
         data4 VARCHAR(5) NOT NULL, PRIMARY KEY (s_id, ai_type))"
            .to_owned(),
        "CREATE TABLE IF NOT EXISTS special_facility (s_id INTEGER NOT NULL REFERENCES subscriber (s_id), \
         sf_type INTEGER NOT NULL, is_active INTEGER NOT NULL, error_cntrl INTEGER NOT NULL, \
         data_a INTEGER NOT NULL, data_b VARCHAR(5) NOT NULL, PRIMARY KEY (s_id, sf_type))"
            .to_owned(),
        "CREATE TABLE IF NOT EXISTS call_forwarding (s_id INTEGER NOT NULL, sf_type INTEGER NOT NULL, \
         start_time INTEGER NOT NULL, end_time INTEGER NOT NULL, numberx VARCHAR(15) NOT NULL, \
         PRIMARY KEY (s_id, sf_type, start_time), \
         FOREIGN KEY (s_id, sf_type) REFERENCES special_facility (s_id, sf_type))"
            .to_owned(),
    ];
    for sql in tables {
        client.query(&sql).await?;
    }
    Ok(())
}

/// The prepared statements of a connection.
pub struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    pub(super) rollback: Statement,
    pub(super) subscriber_data: Statement,
    pub(super) new_destination: Statement,
    pub(super) access_data: Statement,
    pub(super) update_bit: Statement,
    pub(super) update_facility: Statement,
    pub(super) update_location: Statement,
    pub(super) by_number: Statement,
    pub(super) facilities: Statement,
    pub(super) insert_forwarding: Statement,
    pub(super) delete_forwarding: Statement,
}

impl Statements {
    pub(super) async fn prepare(client: &mut Client) -> Result<Statements, Error> {
        use Type::{Int4, Varchar};
        const NEW_DESTINATION: &str = "SELECT cf.numberx FROM special_facility AS sf, call_forwarding AS cf \
             WHERE sf.s_id = $1 AND sf.sf_type = $2 AND sf.is_active = 1 AND cf.s_id = sf.s_id \
             AND cf.sf_type = sf.sf_type AND cf.start_time <= $3 AND cf.end_time > $4";
        const ACCESS_DATA: &str =
            "SELECT data1, data2, data3, data4 FROM access_info WHERE s_id = $1 AND ai_type = $2";
        const UPDATE_FACILITY: &str =
            "UPDATE special_facility SET data_a = $1 WHERE s_id = $2 AND sf_type = $3";
        const UPDATE_LOCATION: &str = "UPDATE subscriber SET vlr_location = $1 WHERE sub_nbr = $2";
        const INSERT: &str = "INSERT INTO call_forwarding (s_id, sf_type, start_time, end_time, numberx) \
                              VALUES ($1, $2, $3, $4, $5)";
        const DELETE: &str =
            "DELETE FROM call_forwarding WHERE s_id = $1 AND sf_type = $2 AND start_time = $3";
        Ok(Statements {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            rollback: client.prepare("ROLLBACK", &[]).await?,
            subscriber_data: client.prepare("SELECT * FROM subscriber WHERE s_id = $1", &[Int4]).await?,
            new_destination: client.prepare(NEW_DESTINATION, &[Int4; 4]).await?,
            access_data: client.prepare(ACCESS_DATA, &[Int4; 2]).await?,
            update_bit: client
                .prepare("UPDATE subscriber SET bit_1 = $1 WHERE s_id = $2", &[Int4; 2])
                .await?,
            update_facility: client.prepare(UPDATE_FACILITY, &[Int4; 3]).await?,
            update_location: client.prepare(UPDATE_LOCATION, &[Int4, Varchar]).await?,
            by_number: client.prepare("SELECT s_id FROM subscriber WHERE sub_nbr = $1", &[Varchar]).await?,
            facilities: client
                .prepare("SELECT sf_type FROM special_facility WHERE s_id = $1", &[Int4])
                .await?,
            insert_forwarding: client.prepare(INSERT, &[Int4, Int4, Int4, Int4, Varchar]).await?,
            delete_forwarding: client.prepare(DELETE, &[Int4; 3]).await?,
        })
    }
}
