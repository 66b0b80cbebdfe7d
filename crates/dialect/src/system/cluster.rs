//! Server-wide catalog tables (`pg_database`, `pg_roles`, `pg_settings`, ...), restricted to the
//! rows that the viewer is allowed to see.

use std::collections::HashMap;
use std::sync::Arc;

use fulmar_meta::{Tenant, User};

use super::asked::{CatalogRequest, Filled, Rows, table};
use super::relations::OWNER;
use super::viewer::Viewer;
use crate::{Result, row};

pub(crate) const TABLES: &[Filled] = &[
    (
        table(
            "pg_database",
            &[
                ("oid", "OID"),
                ("datname", "NAME"),
                ("datdba", "OID"),
                ("encoding", "INT4"),
                ("datlocprovider", "TEXT"),
                ("datistemplate", "BOOLEAN"),
                ("datallowconn", "BOOLEAN"),
                ("datconnlimit", "INT4"),
                ("datfrozenxid", "OID"),
                ("datminmxid", "OID"),
                ("dattablespace", "OID"),
                ("datcollate", "TEXT"),
                ("datctype", "TEXT"),
                ("daticulocale", "TEXT"),
                ("datcollversion", "TEXT"),
                ("datacl", "TEXT"),
            ],
        ),
        databases,
    ),
    (
        table(
            "pg_roles",
            &[
                ("rolname", "NAME"),
                ("rolsuper", "BOOLEAN"),
                ("rolinherit", "BOOLEAN"),
                ("rolcreaterole", "BOOLEAN"),
                ("rolcreatedb", "BOOLEAN"),
                ("rolcanlogin", "BOOLEAN"),
                ("rolreplication", "BOOLEAN"),
                ("rolconnlimit", "INT4"),
                ("rolpassword", "TEXT"),
                ("rolvaliduntil", "TIMESTAMPTZ"),
                ("rolbypassrls", "BOOLEAN"),
                ("rolconfig", "TEXT"),
                ("oid", "OID"),
            ],
        ),
        roles,
    ),
    (
        table(
            "pg_user",
            &[
                ("usename", "NAME"),
                ("usesysid", "OID"),
                ("usecreatedb", "BOOLEAN"),
                ("usesuper", "BOOLEAN"),
                ("userepl", "BOOLEAN"),
                ("usebypassrls", "BOOLEAN"),
                ("passwd", "TEXT"),
            ],
        ),
        |request| {
            let users = request.viewer.users().into_iter();
            Ok(users
                .map(|(oid, user)| {
                    row![user.name.as_str(), oid, user.superuser, user.superuser, false, false, "********"]
                })
                .collect())
        },
    ),
    (
        table(
            "pg_settings",
            &[
                ("name", "TEXT"),
                ("setting", "TEXT"),
                ("unit", "TEXT"),
                ("category", "TEXT"),
                ("short_desc", "TEXT"),
                ("context", "TEXT"),
                ("vartype", "TEXT"),
                ("source", "TEXT"),
            ],
        ),
        |request| {
            let settings = request.viewer.settings().into_iter();
            Ok(settings
                .map(|[name, value, description]| {
                    row![name, value, (), "Session", description, "user", "string", "session"]
                })
                .collect())
        },
    ),
    (
        table(
            "pg_tablespace",
            &[
                ("oid", "OID"),
                ("spcname", "NAME"),
                ("spcowner", "OID"),
                ("spcacl", "TEXT"),
                ("spcoptions", "TEXT"),
            ],
        ),
        |_| Ok(vec![row![1663i64, "pg_default", OWNER, (), ()]]),
    ),
    (
        table(
            "pg_language",
            &[
                ("oid", "OID"),
                ("lanname", "NAME"),
                ("lanowner", "OID"),
                ("lanispl", "BOOLEAN"),
                ("lanpltrusted", "BOOLEAN"),
            ],
        ),
        |_| Ok(vec![row![14i64, "sql", OWNER, false, true], row![16_000i64, "lua", OWNER, true, true]]),
    ),
];

/// The OID of a tenant.
pub fn oid(tenant: &Tenant) -> i64 {
    i64::from(tenant.partition.0 as u32)
}

/// The first OID of users. The owner of the viewer's tenant has [`OWNER`] instead, because it owns
/// the tenant's tables.
pub const FIRST_USER_OID: i64 = 100;

/// The OIDs of the users that the viewer may see, by name.
pub fn user_numbers(viewer: &dyn Viewer) -> HashMap<String, i64> {
    viewer.users().into_iter().map(|(oid, user)| (user.name.clone(), oid)).collect()
}

fn databases(request: CatalogRequest<'_>) -> Result<Rows> {
    let numbers = user_numbers(request.viewer);
    let row = |tenant: &Tenant| {
        row![
            oid(tenant),
            tenant.name.as_str(),
            numbers.get(&tenant.owner).copied(),
            6i64,
            "c",
            false,
            true,
            -1i64,
            0i64,
            0i64,
            1663i64,
            "C",
            "C",
            (),
            (),
            (),
        ]
    };
    Ok(request.viewer.tenants().iter().map(|tenant| row(tenant)).collect())
}

fn roles(request: CatalogRequest<'_>) -> Result<Rows> {
    let row = |(oid, user): (i64, Arc<User>)| {
        let (name, superuser) = (user.name.as_str(), user.superuser);
        row![
            name,
            superuser,
            true,
            superuser,
            superuser,
            user.verifier.is_some(),
            false,
            -1i64,
            "********",
            (),
            false,
            (),
            oid,
        ]
    };
    Ok(request.viewer.users().into_iter().map(row).collect())
}
