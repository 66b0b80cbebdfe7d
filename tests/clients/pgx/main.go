// Tests pgx, the PostgreSQL driver for Go, and its pool. Started by tests/clients/run.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

const endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

// must ends the test at an error.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func ensure(condition bool, what string, values ...any) {
	if !condition {
		panic(fmt.Sprintf(what, values...))
	}
}

// state returns the SQLSTATE of an error, or its text if it has none.
func state(err error) string {
	var answered *pgconn.PgError
	if errors.As(err, &answered) {
		return answered.Code
	}
	return fmt.Sprint(err)
}

// address returns the server's URL for a database and a user (default: the superuser).
func address(database string, user *url.Userinfo) string {
	given, err := url.Parse(os.Getenv("DATABASE_URL"))
	must(err)
	given.Path = "/" + database
	if user != nil {
		given.User = user
	}
	return given.String()
}

func restartServer() {
	fmt.Println("restart")
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	must(err)
	ensure(line == "restarted\n", "unexpected reply of the runner: %q", line)
}

func passwords(ctx context.Context) {
	admin, err := pgx.Connect(ctx, address("fulmar", nil))
	must(err)
	defer admin.Close(ctx)
	_, err = admin.Exec(ctx, "CREATE USER ada PASSWORD 'wing''s'")
	must(err)
	_, err = admin.Exec(ctx, "CREATE DATABASE shop WITH OWNER ada")
	must(err)
	_, err = pgx.Connect(ctx, address("shop", url.UserPassword("ada", "wrong")))
	ensure(state(err) == "28P01", "a wrong password: %v", err)
	_, err = pgx.Connect(ctx, address("no_such_database", nil))
	ensure(state(err) == "3D000", "no such database: %v", err)
}

func migrations(ctx context.Context, pool *pgxpool.Pool) {
	script := `
		CREATE TABLE IF NOT EXISTS customer (id BIGINT PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
		CREATE TABLE IF NOT EXISTS account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL CHECK (balance >= 0));
		CREATE INDEX IF NOT EXISTS customer_since ON customer (since);`
	for range 2 {
		// Without arguments, multiple statements are sent together and are one transaction.
		_, err := pool.Exec(ctx, script)
		must(err)
	}
	tag, err := pool.Exec(ctx, "INSERT INTO customer VALUES ($1, $2, $3)", 1, "ada@example.org", nil)
	must(err)
	ensure(tag.String() == "INSERT 0 1", "%v", tag)
}

func batches(ctx context.Context, pool *pgxpool.Pool) {
	batch := &pgx.Batch{}
	for id := range 1000 {
		batch.Queue("INSERT INTO account VALUES ($1, $2)", id, 100)
	}
	must(pool.SendBatch(ctx, batch).Close())
	// A batch is one transaction, unless it contains transaction control statements.
	failing := &pgx.Batch{}
	failing.Queue("UPDATE account SET balance = 7 WHERE id = 7")
	failing.Queue("INSERT INTO account VALUES (7, 7)")
	err := pool.SendBatch(ctx, failing).Close()
	ensure(state(err) == "23505", "a duplicate in a batch: %v", err)
	var balance int64
	must(pool.QueryRow(ctx, "SELECT balance FROM account WHERE id = $1", 7).Scan(&balance))
	ensure(balance == 100, "a batch must be one transaction: %d", balance)
}

func roundTrip[T any](ctx context.Context, pool *pgxpool.Pool, declared string, values ...T) {
	table := "v_" + strings.ToLower(strings.ReplaceAll(declared, " ", "_"))
	_, err := pool.Exec(ctx, "CREATE TABLE "+table+" (n BIGINT PRIMARY KEY, v "+declared+")")
	must(err)
	var wanted []*T
	for n := range values {
		_, err = pool.Exec(ctx, "INSERT INTO "+table+" VALUES ($1, $2)", n, values[n])
		must(err)
		wanted = append(wanted, &values[n])
	}
	_, err = pool.Exec(ctx, "INSERT INTO "+table+" VALUES ($1, $2)", len(values), nil)
	must(err)
	wanted = append(wanted, nil)
	rows, err := pool.Query(ctx, "SELECT v FROM "+table+" ORDER BY n")
	must(err)
	read, err := pgx.CollectRows(rows, pgx.RowTo[*T])
	must(err)
	shown, err := json.Marshal(read)
	must(err)
	ensure(reflect.DeepEqual(read, wanted), "%s was read as %s", declared, shown)
}

func valuesRoundTrip(ctx context.Context, pool *pgxpool.Pool) {
	roundTrip(ctx, pool, "BIGINT", 0, int64(-1<<63), 1<<63-1)
	roundTrip(ctx, pool, "INT4", int32(-1<<31))
	roundTrip(ctx, pool, "SMALLINT", int16(32767))
	roundTrip(ctx, pool, "DOUBLE PRECISION", 0.5, -1e300)
	roundTrip(ctx, pool, "TEXT", "", "Hé 'quoted' \\ 鳥", strings.Repeat("x", 100_000))
	roundTrip(ctx, pool, "BYTEA", []byte{}, []byte{0, 1, 255})
	roundTrip(ctx, pool, "BOOLEAN", true, false)
	roundTrip(ctx, pool, "DATE", time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC))
	roundTrip(ctx, pool, "TIMESTAMP", time.Date(2026, 11, 20, 23, 59, 59, 123456000, time.UTC))
	roundTrip(ctx, pool, "NUMERIC", pgtype.Numeric{Int: bigInt(12345), Exp: -1, Valid: true})
	roundTrip(ctx, pool, "UUID", pgtype.UUID{Bytes: [16]byte{0x12, 0x34}, Valid: true})
	roundTrip(ctx, pool, "JSON", map[string]any{"a": []any{1.0, nil, "é"}})
	roundTrip(ctx, pool, "JSONB", json.RawMessage(`{"a": 1}`))
	// In Go, the value may have another time zone. It must be the same instant.
	instant := time.Date(2026, 11, 20, 23, 59, 59, 0, time.UTC)
	_, err := pool.Exec(ctx, "CREATE TABLE instants (at TIMESTAMPTZ)")
	must(err)
	_, err = pool.Exec(ctx, "INSERT INTO instants VALUES ($1)", instant)
	must(err)
	var read time.Time
	must(pool.QueryRow(ctx, "SELECT at FROM instants").Scan(&read))
	ensure(read.Equal(instant), "%v was read as %v", instant, read)
}

func procedures(ctx context.Context, pool *pgxpool.Pool) {
	var version string
	must(pool.QueryRow(ctx, "SELECT version()").Scan(&version))
	if !strings.Contains(version, "Fulmar") {
		return // PostgreSQL has no Lua
	}
	_, err := pool.Exec(ctx, `CREATE PROCEDURE product(a BIGINT, b BIGINT) RETURNS TABLE (total BIGINT)
		LANGUAGE lua AS 'return {{ total = a * b }}'`)
	must(err)
	var total int64
	must(pool.QueryRow(ctx, "CALL product($1, $2)", 6, 7).Scan(&total))
	ensure(total == 42, "the procedure returned %d", total)
}

func transactions(ctx context.Context, pool *pgxpool.Pool) {
	deliberate := errors.New("deliberate")
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "UPDATE account SET balance = 1 WHERE id = 1"); err != nil {
			return err
		}
		// A transaction within a transaction is a savepoint.
		inner := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "UPDATE account SET balance = 2 WHERE id = 2")
			must(err)
			return deliberate
		})
		ensure(errors.Is(inner, deliberate), "%v", inner)
		return nil
	})
	must(err)
	rows, _ := pool.Query(ctx, "SELECT balance FROM account WHERE id IN (1, 2) ORDER BY id")
	read, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	must(err)
	ensure(reflect.DeepEqual(read, []int64{1, 100}), "%v", read)

	readOnly, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable, AccessMode: pgx.ReadOnly})
	must(err)
	_, err = readOnly.Exec(ctx, "UPDATE account SET balance = 0")
	ensure(state(err) == "25006", "a write in a read-only transaction: %v", err)
	must(readOnly.Rollback(ctx))
}

func errorsHaveTheRightSqlstate(ctx context.Context, pool *pgxpool.Pool) {
	for wanted, sql := range map[string]string{
		"23505": "INSERT INTO account VALUES (1, 1)",
		"23514": "UPDATE account SET balance = -1 WHERE id = 3",
		"23502": "INSERT INTO account VALUES (5000, NULL)",
		"42P01": "SELECT * FROM no_such_table",
		"42703": "SELECT no_such_column FROM account",
		"42601": "SELEKT 1",
	} {
		tx, err := pool.Begin(ctx)
		must(err)
		_, err = tx.Exec(ctx, sql)
		ensure(state(err) == wanted, "%s: %v", sql, err)
		_, err = tx.Exec(ctx, "SELECT 1")
		ensure(state(err) == "25P02", "after an error: %v", err)
		must(tx.Rollback(ctx))
	}
}

// retry runs a transaction, and retries it after a conflict. docs/clients.md shows this.
func retry(ctx context.Context, pool *pgxpool.Pool, work func(pgx.Tx) error) (attempts int, err error) {
	for attempts = 1; attempts <= 5; attempts++ {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, work)
		var answered *pgconn.PgError
		if !errors.As(err, &answered) || (answered.Code != "40001" && answered.Code != "40P01") {
			return attempts, err
		}
	}
	return attempts, err
}

func conflictsAreRetried(ctx context.Context, pool *pgxpool.Pool) {
	conflicted := false
	attempts, err := retry(ctx, pool, func(tx pgx.Tx) error {
		var balance int64
		if err := tx.QueryRow(ctx, "SELECT balance FROM account WHERE id = $1", 800).Scan(&balance); err != nil {
			return err
		}
		if !conflicted {
			conflicted = true
			_, err := pool.Exec(ctx, "UPDATE account SET balance = balance + 1 WHERE id = 800")
			must(err)
		}
		_, err := tx.Exec(ctx, "UPDATE account SET balance = $1 WHERE id = 800", 2*balance)
		return err
	})
	must(err)
	var balance int64
	must(pool.QueryRow(ctx, "SELECT balance FROM account WHERE id = 800").Scan(&balance))
	ensure(attempts == 2 && balance == 202, "%d attempts, balance %d", attempts, balance)
}

func cancel(ctx context.Context, pool *pgxpool.Pool) {
	short, end := context.WithTimeout(ctx, 200*time.Millisecond)
	defer end()
	_, err := pool.Exec(short, endless)
	ensure(errors.Is(err, context.DeadlineExceeded), "an endless statement ended: %v", err)

	connection, err := pool.Acquire(ctx)
	must(err)
	defer connection.Release()
	_, err = connection.Exec(ctx, "SET statement_timeout = 100")
	must(err)
	_, err = connection.Exec(ctx, endless)
	ensure(state(err) == "57014", "an endless statement ended: %v", err)
	_, err = connection.Exec(ctx, "RESET statement_timeout")
	must(err)
}

func preparedStatementsAfterSchemaChange(ctx context.Context, pool *pgxpool.Pool) {
	_, err := pool.Exec(ctx, "CREATE TABLE grows (a BIGINT); INSERT INTO grows VALUES (1)")
	must(err)
	connection, err := pool.Acquire(ctx)
	must(err)
	defer connection.Release()
	columns := func() (int, error) {
		rows, err := connection.Query(ctx, "SELECT * FROM grows")
		if err != nil {
			return 0, err
		}
		for rows.Next() {
		}
		return len(rows.FieldDescriptions()), rows.Err()
	}
	before, err := columns()
	must(err)
	_, err = pool.Exec(ctx, "ALTER TABLE grows ADD COLUMN b BIGINT")
	must(err)
	// The driver keeps the statement prepared until it receives this error.
	_, err = columns()
	ensure(state(err) == "0A000", "a statement whose columns have changed: %v", err)
	after, err := columns()
	must(err)
	ensure(before == 1 && after == 2, "%d columns, then %d", before, after)
}

func typesAreFound(ctx context.Context, pool *pgxpool.Pool) {
	connection, err := pool.Acquire(ctx)
	must(err)
	defer connection.Release()
	known, err := connection.Conn().LoadType(ctx, "_int8")
	must(err)
	ensure(known.OID == pgtype.Int8ArrayOID, "unexpected OID of bigint[]: %d", known.OID)
	_, err = connection.Conn().LoadType(ctx, "no_such_type")
	ensure(state(err) == "42704", "no such type: %v", err)
}

func poolReconnects(ctx context.Context, pool *pgxpool.Pool) {
	restartServer()
	// A connection of the pool may turn out to be lost when it is used. The next use replaces it.
	for attempt := 1; ; attempt++ {
		var count int64
		err := pool.QueryRow(ctx, "SELECT count(*) FROM account").Scan(&count)
		if err == nil {
			ensure(count == 1000, "%d rows", count)
			return
		}
		ensure(attempt < 5, "the pool must reconnect: %v", err)
	}
}

func main() {
	ctx, end := context.WithTimeout(context.Background(), time.Minute)
	defer end()
	fmt.Println("driver pgx", driverVersion())
	passwords(ctx)
	fmt.Println("ok passwords")

	config, err := pgxpool.ParseConfig(address("shop", url.UserPassword("ada", "wing's")))
	must(err)
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(ctx, config)
	must(err)
	defer pool.Close()
	for _, check := range []struct {
		name string
		run  func(context.Context, *pgxpool.Pool)
	}{
		{"migrations", migrations},
		{"batches", batches},
		{"values round trip", valuesRoundTrip},
		{"procedures", procedures},
		{"transactions", transactions},
		{"errors have the right SQLSTATE", errorsHaveTheRightSqlstate},
		{"conflicts are retried", conflictsAreRetried},
		{"cancel", cancel},
		{"prepared statements after schema change", preparedStatementsAfterSchemaChange},
		{"types are found", typesAreFound},
		{"pool reconnects", poolReconnects},
	} {
		check.run(ctx, pool)
		fmt.Println("ok", check.name)
	}
}
