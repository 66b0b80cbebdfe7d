import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.StringReader;
import java.io.StringWriter;
import java.math.BigDecimal;
import java.net.URI;
import java.sql.BatchUpdateException;
import java.sql.Connection;
import java.sql.DatabaseMetaData;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.ResultSetMetaData;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.LocalTime;
import java.time.OffsetDateTime;
import java.time.ZoneOffset;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Properties;
import java.util.Timer;
import java.util.TimerTask;
import java.util.UUID;
import org.postgresql.PGConnection;
import org.postgresql.copy.CopyManager;

/** Tests pgjdbc, the PostgreSQL driver for Java. Started by tests/clients/run. */
public class Client {
    static final String ENDLESS =
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
    static final BufferedReader RUNNER = new BufferedReader(new InputStreamReader(System.in));

    interface Work<T> {
        T run(Connection connection) throws Exception;
    }

    interface Check {
        void run() throws Exception;
    }

    static Connection connect(String database, String user, String password) throws SQLException {
        URI server = URI.create(System.getenv("DATABASE_URL"));
        Properties login = new Properties();
        login.setProperty("user", user);
        login.setProperty("password", password);
        String url = "jdbc:postgresql://" + server.getHost() + ":" + server.getPort() + "/" + database;
        return DriverManager.getConnection(url + "?" + server.getRawQuery(), login);
    }

    static Connection connect() throws SQLException {
        return connect("shop", "ada", "wing's");
    }

    static Connection connectAsSuperuser(String database) throws SQLException {
        String[] login = URI.create(System.getenv("DATABASE_URL")).getUserInfo().split(":", 2);
        return connect(database, login[0], login[1]);
    }

    static void check(boolean condition, Object... what) {
        if (!condition) {
            throw new AssertionError(Arrays.toString(what));
        }
    }

    /** Requires that the work fails with this SQLSTATE, and returns the exception. */
    static SQLException expectSqlstate(String state, Check work) throws Exception {
        try {
            work.run();
        } catch (SQLException error) {
            String actual = error.getSQLState();
            check(state.equals(actual), state, actual, error.getMessage());
            return error;
        }
        throw new AssertionError("expected SQLSTATE " + state + ", but no exception was thrown");
    }

    static void execute(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    static long number(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement(); ResultSet rows = statement.executeQuery(sql)) {
            check(rows.next(), sql);
            return rows.getLong(1);
        }
    }

    static void passwords() throws Exception {
        try (Connection admin = connectAsSuperuser("fulmar")) {
            execute(admin, "CREATE USER ada PASSWORD 'wing''s'");
            execute(admin, "CREATE DATABASE shop WITH OWNER ada");
        }
        expectSqlstate("28P01", () -> connect("shop", "ada", "wrong"));
        expectSqlstate("3D000", () -> connectAsSuperuser("no_such_database"));
    }

    static void migrations() throws Exception {
        String script = """
                CREATE TABLE IF NOT EXISTS customer (id BIGINT PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
                CREATE TABLE IF NOT EXISTS account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL CHECK (balance >= 0));
                CREATE INDEX IF NOT EXISTS customer_since ON customer (since);
                """;
        try (Connection connection = connect()) {
            connection.setAutoCommit(false);
            for (int time = 0; time < 2; time++) {
                execute(connection, script);
                connection.commit();
            }
            String insert = "INSERT INTO customer (id, email) VALUES (?, ?)";
            try (PreparedStatement statement = connection.prepareStatement(insert, new String[] {"id"})) {
                statement.setLong(1, 1);
                statement.setString(2, "ada@example.org");
                check(statement.executeUpdate() == 1);
                ResultSet keys = statement.getGeneratedKeys();
                check(keys.next() && keys.getLong(1) == 1);
            }
            connection.commit();
        }
    }

    static void batches() throws Exception {
        try (Connection connection = connect();
                PreparedStatement insert = connection.prepareStatement("INSERT INTO account VALUES (?, ?)")) {
            connection.setAutoCommit(false);
            for (int id = 0; id < 1000; id++) {
                insert.setLong(1, id);
                insert.setLong(2, 100);
                insert.addBatch();
            }
            check(Arrays.stream(insert.executeBatch()).sum() == 1000);
            connection.commit();
            for (long id : new long[] {2000, 1}) {
                insert.setLong(1, id);
                insert.setLong(2, 100);
                insert.addBatch();
            }
            check(expectSqlstate("23505", insert::executeBatch) instanceof BatchUpdateException);
            connection.rollback();
            check(number(connection, "SELECT count(*) FROM account") == 1000);
        }
    }

    /**
     * Writes values with a parameter and reads them, often enough that the driver prepares the
     * statements and uses binary format.
     */
    static void roundTrip(Connection connection, String declared, Object... values)
            throws SQLException {
        String table = "v_" + declared.toLowerCase().replace(' ', '_');
        execute(connection, "CREATE TABLE " + table + " (n BIGINT PRIMARY KEY, v " + declared + ")");
        try (PreparedStatement insert = connection.prepareStatement("INSERT INTO " + table + " VALUES (?, ?)");
                PreparedStatement select = connection.prepareStatement("SELECT v FROM " + table + " WHERE n = ?")) {
            for (int n = 0; n < 10; n++) {
                Object value = n < 9 ? values[n % values.length] : null;
                insert.setLong(1, n);
                insert.setObject(2, value);
                insert.executeUpdate();
                select.setLong(1, n);
                ResultSet rows = select.executeQuery();
                check(rows.next());
                Object read = value == null ? rows.getObject(1) : rows.getObject(1, value.getClass());
                check(Objects.deepEquals(read, value), declared, value, read);
            }
        }
    }

    static void valuesRoundTrip() throws Exception {
        try (Connection connection = connect()) {
            roundTrip(connection, "BIGINT", 0L, Long.MIN_VALUE, Long.MAX_VALUE);
            roundTrip(connection, "INT4", Integer.MIN_VALUE);
            roundTrip(connection, "SMALLINT", 32767);
            roundTrip(connection, "DOUBLE PRECISION", 0.5, -1e300);
            roundTrip(connection, "TEXT", "", "Hé 'quoted' \\ 鳥", "x".repeat(100_000));
            roundTrip(connection, "BYTEA", new byte[0], new byte[] {0, 1, -1});
            roundTrip(connection, "BOOLEAN", true, false);
            roundTrip(connection, "DATE", LocalDate.of(2026, 11, 20));
            roundTrip(connection, "TIME", LocalTime.of(23, 59, 59, 5000));
            LocalDateTime timestamp = LocalDateTime.of(2026, 11, 20, 23, 59, 59, 123456000);
            roundTrip(connection, "TIMESTAMP", timestamp);
            OffsetDateTime instant = OffsetDateTime.of(2026, 11, 20, 23, 59, 59, 0, ZoneOffset.UTC);
            roundTrip(connection, "TIMESTAMPTZ", instant);
            roundTrip(connection, "NUMERIC", new BigDecimal("1234.5"));
            roundTrip(connection, "UUID", UUID.fromString("12345678-1234-5678-1234-567812345678"));
        }
    }

    static void transactions() throws Exception {
        try (Connection connection = connect()) {
            connection.setAutoCommit(false);
            execute(connection, "UPDATE account SET balance = 1 WHERE id = 1");
            Savepoint before = connection.setSavepoint();
            execute(connection, "UPDATE account SET balance = 2 WHERE id = 2");
            connection.rollback(before);
            connection.commit();
            check(number(connection, "SELECT balance FROM account WHERE id = 1") == 1);
            check(number(connection, "SELECT balance FROM account WHERE id = 2") == 100);
            connection.rollback();
            connection.setReadOnly(true);
            expectSqlstate("25006", () -> execute(connection, "UPDATE account SET balance = 0"));
        }
    }

    static void rowsAreFetchedInBatches() throws Exception {
        try (Connection connection = connect(); Statement statement = connection.createStatement()) {
            connection.setAutoCommit(false);
            statement.setFetchSize(100);
            ResultSet rows = statement.executeQuery("SELECT id FROM account ORDER BY id");
            for (long id = 0; id < 1000; id++) {
                check(rows.next() && rows.getLong(1) == id);
            }
            check(!rows.next());
            CopyManager copy = connection.unwrap(PGConnection.class).getCopyAPI();
            String lines = "5000\t1\n5001\t2\n";
            check(copy.copyIn("COPY account FROM STDIN", new StringReader(lines)) == 2);
            StringWriter out = new StringWriter();
            copy.copyOut("COPY (SELECT * FROM account WHERE id >= 5000 ORDER BY id) TO STDOUT", out);
            check(out.toString().equals(lines), out);
            connection.rollback();
        }
    }

    static void errorsHaveTheRightSqlstate() throws Exception {
        Map<String, String> expected = new LinkedHashMap<>();
        expected.put("23505", "INSERT INTO account VALUES (1, 1)");
        expected.put("23514", "UPDATE account SET balance = -1 WHERE id = 3");
        expected.put("23502", "INSERT INTO account VALUES (5000, NULL)");
        expected.put("42P01", "SELECT * FROM no_such_table");
        expected.put("42703", "SELECT no_such_column FROM account");
        expected.put("42601", "SELEKT 1");
        try (Connection connection = connect()) {
            connection.setAutoCommit(false);
            for (Map.Entry<String, String> each : expected.entrySet()) {
                expectSqlstate(each.getKey(), () -> execute(connection, each.getValue()));
                expectSqlstate("25P02", () -> execute(connection, "SELECT 1"));
                connection.rollback();
            }
        }
    }

    /** Runs a transaction, and retries it after a conflict. docs/clients.md shows this. */
    static <T> T retry(Work<T> work) throws Exception {
        try (Connection connection = connect()) {
            connection.setAutoCommit(false);
            connection.setTransactionIsolation(Connection.TRANSACTION_SERIALIZABLE);
            for (int attempt = 1; ; attempt++) {
                try {
                    T answer = work.run(connection);
                    connection.commit();
                    return answer;
                } catch (SQLException failure) {
                    if (attempt == 5 || !List.of("40001", "40P01").contains(failure.getSQLState())) {
                        throw failure;
                    }
                    connection.rollback();
                }
            }
        }
    }

    static void conflictsAreRetried() throws Exception {
        int[] attempts = {0};
        long written = retry(connection -> {
            long balance = number(connection, "SELECT balance FROM account WHERE id = 800");
            if (attempts[0]++ == 0) {
                try (Connection other = connect()) {
                    execute(other, "UPDATE account SET balance = balance + 1 WHERE id = 800");
                }
            }
            execute(connection, "UPDATE account SET balance = " + 2 * balance + " WHERE id = 800");
            return 2 * balance;
        });
        check(attempts[0] == 2 && written == 202, attempts[0], written);
    }

    static void cancel() throws Exception {
        try (Connection connection = connect(); Statement statement = connection.createStatement()) {
            // A request that arrives before the statement has no effect, so it is repeated until it
            // works.
            Timer timer = new Timer(true);
            timer.schedule(new TimerTask() {
                @Override
                public void run() {
                    try {
                        statement.cancel();
                    } catch (SQLException failure) {
                        throw new AssertionError(failure);
                    }
                }
            }, 50, 50);
            expectSqlstate("57014", () -> statement.executeQuery(ENDLESS));
            timer.cancel();
        }
        try (Connection connection = connect(); Statement statement = connection.createStatement()) {
            statement.setQueryTimeout(1);
            expectSqlstate("57014", () -> statement.executeQuery(ENDLESS));
            execute(connection, "SET statement_timeout = 100");
            statement.setQueryTimeout(0);
            expectSqlstate("57014", () -> statement.executeQuery(ENDLESS));
        }
    }

    static void preparedStatementsAfterSchemaChange() throws Exception {
        try (Connection connection = connect(); Connection other = connect()) {
            execute(connection, "CREATE TABLE grows (a BIGINT)");
            execute(connection, "INSERT INTO grows VALUES (1)");
            try (PreparedStatement select = connection.prepareStatement("SELECT * FROM grows")) {
                // From the fifth execution, the driver uses a server-side prepared statement.
                for (int time = 0; time < 6; time++) {
                    check(select.executeQuery().getMetaData().getColumnCount() == 1);
                }
                execute(other, "ALTER TABLE grows ADD COLUMN b BIGINT");
                // The driver receives the error that its statement is stale, and prepares it again
                // by itself.
                check(select.executeQuery().getMetaData().getColumnCount() == 2);
            }
        }
    }

    /** The values of some columns of all rows, as text of the form `a,b`. */
    static List<String> rows(ResultSet rows, String... columns) throws SQLException {
        List<String> read = new ArrayList<>();
        while (rows.next()) {
            List<String> row = new ArrayList<>();
            for (String column : columns) {
                row.add(rows.getString(column));
            }
            read.add(String.join(",", row));
        }
        return read;
    }

    static void isSame(List<String> read, String... wanted) {
        check(read.equals(List.of(wanted)), read);
    }

    /** The queries of tools about a database: the usual methods of JDBC's metadata. */
    static void metadata() throws Exception {
        try (Connection connection = connect()) {
            execute(connection, """
                    CREATE TABLE purchase (
                        id BIGINT NOT NULL PRIMARY KEY,
                        customer BIGINT NOT NULL REFERENCES customer (id) ON DELETE CASCADE,
                        total NUMERIC(10, 2) DEFAULT 0,
                        note VARCHAR(80)
                    );
                    CREATE INDEX purchase_by_customer ON purchase (customer, id);
                    CREATE VIEW spent AS SELECT customer, sum(total) AS total FROM purchase GROUP BY customer;
                    """);
            DatabaseMetaData about = connection.getMetaData();
            isSame(rows(about.getSchemas(null, "public"), "TABLE_SCHEM"), "public");
            String[] kinds = {"TABLE", "VIEW"};
            isSame(rows(about.getTables(null, "public", "purch%", kinds), "TABLE_NAME", "TABLE_TYPE"), "purchase,TABLE");
            isSame(rows(about.getTables(null, "public", "spent", kinds), "TABLE_NAME", "TABLE_TYPE"), "spent,VIEW");
            isSame(
                    rows(about.getColumns(null, "public", "purchase", "%"),
                            "COLUMN_NAME", "DATA_TYPE", "TYPE_NAME", "COLUMN_SIZE", "DECIMAL_DIGITS", "IS_NULLABLE", "ORDINAL_POSITION"),
                    "id,-5,int8,19,0,NO,1",
                    "customer,-5,int8,19,0,NO,2",
                    "total,2,numeric,10,2,YES,3",
                    "note,12,varchar,80,0,YES,4");
            isSame(rows(about.getPrimaryKeys(null, "public", "purchase"), "COLUMN_NAME", "KEY_SEQ"), "id,1");
            List<String> indexes = rows(about.getIndexInfo(null, "public", "purchase", false, true),
                    "INDEX_NAME", "ORDINAL_POSITION", "COLUMN_NAME");
            check(indexes.size() == 3, indexes);
            check(indexes.contains("purchase_by_customer,1,customer"), indexes);
            check(indexes.contains("purchase_by_customer,2,id"), indexes);
            String[] key = {"PKTABLE_NAME", "PKCOLUMN_NAME", "FKTABLE_NAME", "FKCOLUMN_NAME", "KEY_SEQ", "DELETE_RULE"};
            isSame(rows(about.getImportedKeys(null, "public", "purchase"), key), "customer,id,purchase,customer,1,0");
            isSame(rows(about.getExportedKeys(null, "public", "customer"), key), "customer,id,purchase,customer,1,0");
            List<String> types = rows(about.getTypeInfo(), "TYPE_NAME");
            List<String> some = List.of("int8", "text", "bool", "numeric", "timestamptz", "json");
            check(types.containsAll(some), types);
            isSame(rows(about.getBestRowIdentifier(null, "public", "purchase", 0, true), "COLUMN_NAME"), "id");
            ResultSet functions = about.getFunctions(null, null, "no_such_function");
            check(rows(functions, "FUNCTION_NAME").isEmpty());
            check(about.getMaxColumnNameLength() == 63, about.getMaxColumnNameLength());
            try (PreparedStatement select = connection.prepareStatement("SELECT total FROM purchase")) {
                ResultSetMetaData columns = select.getMetaData();
                check(List.of("", "purchase").contains(columns.getTableName(1)));
                check(columns.getPrecision(1) == 10 && columns.getScale(1) == 2);
            }
        }
    }

    static void procedures() throws Exception {
        try (Connection connection = connect()) {
            if (!connection.getMetaData().getDatabaseProductVersion().contains("Fulmar")) {
                return; // PostgreSQL has no Lua
            }
            execute(connection, """
                    CREATE PROCEDURE product(a BIGINT, b BIGINT) RETURNS TABLE (total BIGINT)
                    LANGUAGE lua AS 'return {{ total = a * b }}'
                    """);
            try (PreparedStatement call = connection.prepareStatement("CALL product(?, ?)")) {
                call.setLong(1, 6);
                call.setLong(2, 7);
                ResultSet rows = call.executeQuery();
                check(rows.next() && rows.getLong("total") == 42 && !rows.next());
            }
        }
    }

    static void reconnectAfterRestart() throws Exception {
        try (Connection connection = connect()) {
            check(connection.isValid(5));
            System.out.println("restart");
            check("restarted".equals(RUNNER.readLine()));
            check(!connection.isValid(5));
        }
        try (Connection connection = connect()) {
            check(number(connection, "SELECT count(*) FROM account") == 1000);
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.out.println("driver pgjdbc " + org.postgresql.util.DriverInfo.DRIVER_VERSION);
        Map<String, Check> checks = new LinkedHashMap<>();
        checks.put("passwords", Client::passwords);
        checks.put("migrations", Client::migrations);
        checks.put("batches", Client::batches);
        checks.put("values round trip", Client::valuesRoundTrip);
        checks.put("transactions", Client::transactions);
        checks.put("rows are fetched in batches", Client::rowsAreFetchedInBatches);
        checks.put("errors have the right SQLSTATE", Client::errorsHaveTheRightSqlstate);
        checks.put("conflicts are retried", Client::conflictsAreRetried);
        checks.put("cancel", Client::cancel);
        checks.put(
                "prepared statements after schema change",
                Client::preparedStatementsAfterSchemaChange);
        checks.put("metadata", Client::metadata);
        checks.put("procedures", Client::procedures);
        checks.put("reconnect after restart", Client::reconnectAfterRestart);
        for (Map.Entry<String, Check> check : checks.entrySet()) {
            check.getValue().run();
            System.out.println("ok " + check.getKey());
        }
    }
}
