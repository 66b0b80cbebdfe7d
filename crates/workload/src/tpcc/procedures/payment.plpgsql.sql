CREATE OR REPLACE FUNCTION tpcc_payment(
    w INTEGER, d INTEGER, cw INTEGER, cd INTEGER, c INTEGER, last_name TEXT, amount BIGINT)
RETURNS TABLE (
    customer_number INTEGER, first_name TEXT, customer_last_name TEXT, credit TEXT, discount INTEGER,
    balance_cents BIGINT, warehouse_name TEXT, district_name TEXT)
LANGUAGE plpgsql AS $$
DECLARE
    numbers INTEGER[];
    customer_row RECORD;
    district_row RECORD;
    warehouse_row RECORD;
BEGIN
    IF c = 0 THEN
        numbers := ARRAY(SELECT c_id FROM customer WHERE c_w_id = cw AND c_d_id = cd AND c_last = last_name
            ORDER BY c_first);
        c := numbers[(cardinality(numbers) + 1) / 2];
    END IF;
    UPDATE customer SET c_balance = c_balance - amount,
        c_ytd_payment = c_ytd_payment + amount, c_payment_cnt = c_payment_cnt + 1
        WHERE c_w_id = cw AND c_d_id = cd AND c_id = c
        RETURNING c_credit, c_first, c_middle, c_last, c_street_1, c_street_2, c_city, c_state, c_zip,
        c_phone, c_since, c_credit_lim, c_discount, c_balance INTO STRICT customer_row;
    IF customer_row.c_credit = 'BC' THEN
        UPDATE customer SET c_data = substr(concat_ws(' ', c, cd, cw, d, w, amount) || ' | ' || c_data, 1, 500)
            WHERE c_w_id = cw AND c_d_id = cd AND c_id = c;
    END IF;
    UPDATE district SET d_ytd = d_ytd + amount WHERE d_w_id = w AND d_id = d
        RETURNING d_name, d_street_1, d_street_2, d_city, d_state, d_zip INTO STRICT district_row;
    UPDATE warehouse SET w_ytd = w_ytd + amount WHERE w_id = w
        RETURNING w_name, w_street_1, w_street_2, w_city, w_state, w_zip INTO STRICT warehouse_row;
    INSERT INTO history (h_c_id, h_c_d_id, h_c_w_id, h_d_id, h_w_id, h_date, h_amount, h_data)
        VALUES (c, cd, cw, d, w, CURRENT_TIMESTAMP, amount, warehouse_row.w_name || '    ' || district_row.d_name);
    RETURN QUERY SELECT c, customer_row.c_first::TEXT, customer_row.c_last::TEXT, customer_row.c_credit::TEXT,
        customer_row.c_discount, customer_row.c_balance, warehouse_row.w_name::TEXT, district_row.d_name::TEXT;
END $$
