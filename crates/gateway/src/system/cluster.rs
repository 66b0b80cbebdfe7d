//! Server-wide catalog tables (`pg_database`, `pg_roles`, `pg_settings`, ...), restricted to the
//! rows that the viewer is allowed to see.

use std::collections::HashMap;
use std::sync::Arc;

use fulmar_meta::{Tenant, User};

use super::cells::row;
use super::relations::OWNER;
use super::{Asked, Filled, Rows, Viewer, table};
use crate::Result;

pub(super) const TABLES: &[Filled] = &[
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
        |asked| {
            let users = users(asked.viewer).into_iter();
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
        |asked| {
            let settings = asked.viewer.settings.all().into_iter();
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
pub(super) fn oid(tenant: &Tenant) -> i64 {
    i64::from(tenant.partition.0 as u32)
}

/// The tenants that the viewer may connect to. The names of other tenants are confidential.
pub(super) fn tenants(viewer: &Viewer) -> Vec<Arc<Tenant>> {
    let catalog = &viewer.shared.catalog;
    let user = catalog.user(&viewer.identity.user);
    let mut tenants = catalog.tenants();
    tenants.retain(|tenant| {
        viewer.identity.superuser || user.as_ref().is_some_and(|user| catalog.may_connect(user, tenant))
    });
    tenants
}

/// The first OID of users. The owner of the viewer's tenant has [`OWNER`] instead, because it owns
/// the tenant's tables.
const FIRST_USER_OID: i64 = 100;

/// The users that the viewer may see, with their OIDs. A superuser sees all users. Other users see
/// themselves and the owners of the tenants that they may connect to.
pub(super) fn users(viewer: &Viewer) -> Vec<(i64, Arc<User>)> {
    let identity = &viewer.identity;
    let owners: Vec<String> = match identity.superuser {
        true => Vec::new(),
        false => tenants(viewer).iter().map(|tenant| tenant.owner.clone()).collect(),
    };
    let numbered = (FIRST_USER_OID..).zip(viewer.shared.catalog.users());
    numbered
        .filter(|(_, user)| identity.superuser || user.name == identity.user || owners.contains(&user.name))
        .map(|(oid, user)| if user.name == identity.tenant.owner { (OWNER, user) } else { (oid, user) })
        .collect()
}

/// The OIDs of the users that the viewer may see, by name.
pub(super) fn user_numbers(viewer: &Viewer) -> HashMap<String, i64> {
    users(viewer).into_iter().map(|(oid, user)| (user.name.clone(), oid)).collect()
}

fn databases(asked: Asked<'_>) -> Result<Rows> {
    let numbers = user_numbers(asked.viewer);
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
    Ok(tenants(asked.viewer).iter().map(|tenant| row(tenant)).collect())
}

fn roles(asked: Asked<'_>) -> Result<Rows> {
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
    Ok(users(asked.viewer).into_iter().map(row).collect())
}
