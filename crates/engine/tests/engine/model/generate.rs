//! Random statements over a small schema that covers SQLite's features: cascading and deferred
//! foreign keys, triggers, views, partial, unique and expression indexes, generated columns,
//! WITHOUT ROWID, AUTOINCREMENT, full-text search.

use fulmar_engine::Value;

use crate::seeds::Random;

/// The initial schema.
pub const SCHEMA: &[&str] = &[
    "CREATE TABLE cities(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT COLLATE NOCASE UNIQUE, people INT DEFAULT 0)",
    "CREATE TABLE people(id INTEGER PRIMARY KEY, name TEXT NOT NULL, age INTEGER CHECK (age >= 0), \
     city INTEGER REFERENCES cities(id) ON DELETE SET NULL ON UPDATE CASCADE, score REAL)",
    "CREATE TABLE tags(person INTEGER REFERENCES people(id) ON DELETE CASCADE ON UPDATE CASCADE \
     DEFERRABLE INITIALLY DEFERRED, tag TEXT, weight, PRIMARY KEY(person, tag)) WITHOUT ROWID",
    "CREATE TABLE notes(body TEXT, extra, length INTEGER GENERATED ALWAYS AS (length(body)) STORED, \
     twice TEXT AS (body || body) VIRTUAL)",
    "CREATE TABLE audit(id INTEGER PRIMARY KEY, what TEXT, key)",
    "CREATE TABLE strict(id ANY PRIMARY KEY, n INTEGER, t TEXT NOT NULL DEFAULT 'none') STRICT",
    "CREATE VIRTUAL TABLE words USING fts5(body)",
    "CREATE VIRTUAL TABLE boxes USING rtree(id, x0, x1)",
    "CREATE INDEX people_city ON people(city, age DESC)",
    "CREATE INDEX adults ON people(name) WHERE age >= 18",
    "CREATE VIEW inhabitants AS SELECT p.id, p.name, c.name AS city FROM people p LEFT JOIN cities c ON c.id = p.city",
    "CREATE TRIGGER person_added AFTER INSERT ON people BEGIN \
     INSERT INTO audit(what, key) VALUES ('added', new.id); \
     UPDATE cities SET people = people + 1 WHERE id = new.city; END",
    "CREATE TRIGGER person_aged AFTER UPDATE OF age ON people WHEN new.age IS NOT old.age BEGIN \
     INSERT INTO audit(what, key) VALUES ('aged', new.id); END",
    "CREATE TRIGGER unlucky BEFORE DELETE ON people WHEN old.age = 13 BEGIN SELECT RAISE(ABORT, 'bad luck'); END",
    "CREATE TRIGGER forbidden BEFORE INSERT ON notes WHEN new.extra = 13 BEGIN SELECT RAISE(ROLLBACK, 'all is lost'); END",
    "CREATE TRIGGER move_in INSTEAD OF INSERT ON inhabitants BEGIN \
     INSERT INTO people(name, city) VALUES (new.name, (SELECT id FROM cities WHERE name = new.city)); END",
];

/// A statement and its parameters.
pub struct Generated {
    pub sql: String,
    pub parameters: Vec<Value>,
}

impl Generated {
    pub fn plain(sql: impl Into<String>) -> Generated {
        Generated { sql: sql.into(), parameters: Vec::new() }
    }

    fn with(sql: impl Into<String>, parameters: Vec<Value>) -> Generated {
        Generated { sql: sql.into(), parameters }
    }
}

const WORDS: [&str; 10] = ["ash", "birch", "cedar", "elm", "fir", "Ash", "oak", "pine", "yew", "żółw"];

const OR: [&str; 8] = ["", "", "", " OR REPLACE", " OR IGNORE", " OR FAIL", " OR ABORT", " OR ROLLBACK"];

fn word(random: &mut Random) -> Value {
    Value::Text((*random.pick(&WORDS)).to_owned())
}

/// A small number, which is often the id of an existing row.
fn id(random: &mut Random) -> Value {
    Value::Integer(random.between(1, 25))
}

/// A random value of any type.
fn value(random: &mut Random) -> Value {
    match random.below(12) {
        0 => Value::Null,
        1 => Value::Real(random.between(-1000, 1000) as f64 / 8.0),
        2 => Value::Blob((0..random.below(40)).map(|i| i as u8).collect()),
        3 => Value::Text("long ".repeat(random.below(3000) as usize)),
        4 => random.pick(&[Value::Integer(i64::MAX), Value::Integer(i64::MIN), Value::Real(1e300)]).clone(),
        5 | 6 => word(random),
        7 => Value::Text(random.between(-5, 50).to_string()),
        _ => Value::Integer(random.between(-3, 60)),
    }
}

/// The next statement: 48 % change rows, 34 % read, 12 % change the schema, and 6 % are invalid.
pub fn statement(random: &mut Random) -> Generated {
    match random.below(100) {
        0..48 => change(random),
        48..82 => query(random),
        82..94 => schema_change(random),
        _ => broken(random),
    }
}

fn change(random: &mut Random) -> Generated {
    match random.below(4) {
        0 | 1 => insert(random),
        2 => update(random),
        _ => delete(random),
    }
}

fn insert(random: &mut Random) -> Generated {
    let or = *random.pick(&OR);
    let sql = |text: &str| text.replace("{or}", or);
    match random.below(14) {
        0..3 => {
            let parameters = vec![word(random), value(random), id(random), value(random)];
            Generated::with(
                sql("INSERT{or} INTO people(name, age, city, score) VALUES ($1, $2, $3, $4)"),
                parameters,
            )
        }
        3 => {
            // Parameters out of order, and one of them used twice.
            let parameters = vec![id(random), word(random), id(random)];
            Generated::with(
                sql("INSERT{or} INTO people(name, id, age, score) VALUES ($2, $1, $3, $1)"),
                parameters,
            )
        }
        4 => Generated::with(
            sql("INSERT{or} INTO cities(name) VALUES ($1), ($2) RETURNING id, name"),
            vec![word(random), word(random)],
        ),
        5 => Generated::with(
            "INSERT INTO cities(name, people) VALUES ($1, 1) ON CONFLICT(name) DO UPDATE SET people = people + excluded.people RETURNING *",
            vec![word(random)],
        ),
        6 => Generated::with(
            sql("INSERT{or} INTO tags VALUES ($1, $2, $3)"),
            vec![id(random), word(random), value(random)],
        ),
        7 => Generated::with(
            "INSERT INTO tags(person, tag) SELECT id, $1 FROM people WHERE age > $2 ON CONFLICT DO UPDATE SET weight = coalesce(weight, 0) + 1",
            vec![word(random), id(random)],
        ),
        8 | 9 => Generated::with(
            "INSERT INTO notes(body, extra) VALUES ($1, $2)",
            vec![value(random), value(random)],
        ),
        10 => Generated::with(
            sql("INSERT{or} INTO strict(id, n, t) VALUES ($1, $2, $3)"),
            vec![value(random), value(random), value(random)],
        ),
        11 => Generated::with(
            "INSERT INTO inhabitants(name, city) VALUES ($1, $2)",
            vec![word(random), word(random)],
        ),
        12 => Generated::with(
            "INSERT INTO words(body) VALUES ($1 || ' ' || $2)",
            vec![word(random), word(random)],
        ),
        _ => Generated::with(
            sql("INSERT{or} INTO boxes VALUES ($1, $2, $2 + $3)"),
            vec![id(random), id(random), id(random)],
        ),
    }
}

fn update(random: &mut Random) -> Generated {
    let or = *random.pick(&OR);
    let sql = |text: &str| text.replace("{or}", or);
    match random.below(9) {
        0 => Generated::with(
            sql("UPDATE{or} people SET age = age + $1 WHERE id % 3 = $2 % 3"),
            vec![value(random), id(random)],
        ),
        1 => Generated::with(
            sql("UPDATE{or} people SET id = id + $1 WHERE id = $2"),
            vec![id(random), id(random)],
        ),
        2 => Generated::with(
            sql("UPDATE{or} people SET city = $1, score = score * 1.5 WHERE name = $2 RETURNING id, score"),
            vec![id(random), word(random)],
        ),
        3 => Generated::with(
            sql("UPDATE{or} cities SET name = $1 WHERE id = $2"),
            vec![word(random), id(random)],
        ),
        4 => Generated::with(
            sql("UPDATE{or} tags SET tag = $1, weight = $3 WHERE person = $2"),
            vec![word(random), id(random), value(random)],
        ),
        5 => Generated::with(
            "UPDATE notes SET body = $1 WHERE rowid % 4 = $2 % 4",
            vec![value(random), id(random)],
        ),
        6 => Generated::with(
            "UPDATE people SET score = c.people FROM cities c WHERE c.id = people.city AND c.people > $1",
            vec![id(random)],
        ),
        7 => Generated::with("UPDATE words SET body = $1 WHERE rowid = $2", vec![word(random), id(random)]),
        _ => Generated::with(
            sql("UPDATE{or} strict SET n = $1 WHERE id = $2"),
            vec![value(random), value(random)],
        ),
    }
}

fn delete(random: &mut Random) -> Generated {
    match random.below(8) {
        0 => Generated::with("DELETE FROM people WHERE id = $1", vec![id(random)]),
        1 => Generated::with("DELETE FROM people WHERE age > $1 RETURNING id, name, age", vec![id(random)]),
        2 => Generated::with("DELETE FROM cities WHERE id = $1", vec![id(random)]),
        3 => Generated::with("DELETE FROM tags WHERE tag = $1", vec![word(random)]),
        4 => Generated::with("DELETE FROM notes WHERE rowid % 5 = $1 % 5", vec![id(random)]),
        5 => Generated::with("DELETE FROM words WHERE words MATCH $1", vec![word(random)]),
        6 => Generated::with("DELETE FROM boxes WHERE x0 > $1", vec![id(random)]),
        // Deletes all rows: SQLite then clears the tree without reading them.
        _ => Generated::plain(*random.pick(&[
            "DELETE FROM notes",
            "DELETE FROM audit",
            "DELETE FROM strict",
            "DELETE FROM tags",
        ])),
    }
}

const QUERIES: [&str; 24] = [
    "SELECT * FROM people WHERE id = $1",
    "SELECT * FROM people WHERE city = $1 AND age > 10",
    "SELECT name, count(*), sum(age), avg(score), min(city) FROM people GROUP BY name HAVING count(*) > $1 % 3",
    "SELECT * FROM inhabitants WHERE city IS NOT NULL LIMIT $1",
    "SELECT p.name, t.tag FROM people p JOIN tags t ON t.person = p.id WHERE p.age < $1",
    "SELECT c.name, group_concat(p.name, ',') FROM cities c LEFT JOIN people p ON p.city = c.id GROUP BY c.id",
    "SELECT name FROM people WHERE age >= 18 ORDER BY name, id DESC LIMIT 5 OFFSET $1 % 4",
    "SELECT rowid, length, substr(twice, 1, 9), typeof(extra) FROM notes WHERE length > $1",
    "SELECT id, row_number() OVER (PARTITION BY city ORDER BY age, id), sum(age) OVER (ORDER BY id) FROM people",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < $1) SELECT i, i * i FROM n",
    "SELECT * FROM tags WHERE person IN (SELECT id FROM people WHERE age > $1) ORDER BY tag DESC",
    "SELECT DISTINCT tag FROM tags UNION SELECT name FROM people EXCEPT SELECT name FROM cities",
    "SELECT what, count(*), max(key) FROM audit GROUP BY what",
    "SELECT * FROM strict ORDER BY id",
    "SELECT rowid, body FROM words WHERE words MATCH 'oak OR elm' ORDER BY rank, rowid",
    "SELECT id FROM boxes WHERE x0 <= $1 AND x1 >= $1",
    "SELECT json_group_array(json_object('n', name, 'a', age)) FROM people WHERE id < $1",
    "SELECT EXISTS (SELECT 1 FROM people WHERE name LIKE 'o%' AND id > $1), quote(total(score)) FROM people",
    "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name",
    "SELECT name, seq FROM sqlite_sequence",
    "PRAGMA table_info(people)",
    "PRAGMA foreign_key_check",
    "PRAGMA user_version",
    "SELECT printf('%08.3f|%s', score, name) FROM people ORDER BY score DESC, id LIMIT 3",
];

fn query(random: &mut Random) -> Generated {
    Generated::with(*random.pick(&QUERIES), vec![id(random)])
}

const SCHEMA_CHANGES: [&str; 29] = [
    "CREATE TABLE extra AS SELECT id, name, age FROM people",
    "CREATE TABLE IF NOT EXISTS extra(id INTEGER PRIMARY KEY, name TEXT, age)",
    "DROP TABLE extra",
    "DROP TABLE IF EXISTS extra",
    "ALTER TABLE extra ADD COLUMN colour TEXT DEFAULT 'red'",
    "ALTER TABLE extra DROP COLUMN colour",
    "ALTER TABLE extra RENAME COLUMN name TO title",
    "ALTER TABLE extra RENAME TO renamed",
    "ALTER TABLE renamed RENAME TO extra",
    "INSERT INTO extra SELECT * FROM extra",
    "SELECT * FROM extra",
    "UPDATE extra SET age = age + 1",
    "CREATE INDEX people_age ON people(age, name)",
    "DROP INDEX IF EXISTS people_age",
    "CREATE UNIQUE INDEX unique_scores ON people(score, name)",
    "DROP INDEX unique_scores",
    "CREATE INDEX notes_lengths ON notes(length(body), lower(body))",
    "DROP INDEX IF EXISTS notes_lengths",
    "CREATE TRIGGER IF NOT EXISTS city_gone AFTER DELETE ON cities BEGIN INSERT INTO audit(what, key) VALUES ('gone', old.name); END",
    "DROP TRIGGER IF EXISTS city_gone",
    "CREATE VIEW IF NOT EXISTS old AS SELECT * FROM people WHERE age > 30",
    "SELECT count(*), max(age) FROM old",
    "DROP VIEW IF EXISTS old",
    "CREATE TEMP TABLE IF NOT EXISTS passing(n INTEGER)",
    "INSERT INTO passing SELECT age FROM people RETURNING n",
    "DROP TABLE IF EXISTS temp.passing",
    "REINDEX",
    "PRAGMA user_version = 7",
    "INSERT INTO words(words) VALUES ('optimize')",
];

fn schema_change(random: &mut Random) -> Generated {
    Generated::plain(*random.pick(&SCHEMA_CHANGES))
}

const BROKEN: [&str; 12] = [
    "SELECT * FROM nowhere",
    "SELECT missing FROM people",
    "SELECT FROM people",
    "INSERT INTO people(name) VALUES (NULL)",
    "INSERT INTO people(id, name) SELECT id, name FROM people",
    "INSERT INTO people(name, city) VALUES ('nobody', 999999)",
    "UPDATE people SET age = -1",
    "SELECT sum(9223372036854775807) FROM (SELECT 1 UNION ALL SELECT 2)",
    "INSERT INTO strict(id, n) VALUES (1, 'no number')",
    "SELECT json_extract('{', '$.a')",
    "CREATE TABLE people(id)",
    "SELECT no_such_function(1)",
];

fn broken(random: &mut Random) -> Generated {
    Generated::plain(*random.pick(&BROKEN))
}
