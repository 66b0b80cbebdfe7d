CREATE OR REPLACE FUNCTION tpcc_order_status(w INTEGER, d INTEGER, c INTEGER, last_name TEXT)
RETURNS TABLE (
    balance_cents BIGINT, order_number INTEGER, carrier INTEGER, item INTEGER, supplier INTEGER,
    quantity INTEGER, amount_cents BIGINT, delivered TIMESTAMP)
LANGUAGE plpgsql AS $$
DECLARE
    numbers INTEGER[];
    customer_row RECORD;
    order_row RECORD;
BEGIN
    IF c = 0 THEN
        numbers := ARRAY(SELECT c_id FROM customer WHERE c_w_id = w AND c_d_id = d AND c_last = last_name
            ORDER BY c_first);
        c := numbers[(cardinality(numbers) + 1) / 2];
    END IF;
    SELECT c_balance, c_first, c_middle, c_last INTO STRICT customer_row FROM customer
        WHERE c_w_id = w AND c_d_id = d AND c_id = c;
    SELECT o_id, o_entry_d, o_carrier_id INTO STRICT order_row FROM orders
        WHERE o_w_id = w AND o_d_id = d AND o_c_id = c ORDER BY o_id DESC LIMIT 1;
    RETURN QUERY SELECT customer_row.c_balance, order_row.o_id, order_row.o_carrier_id,
        ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_delivery_d
        FROM order_line WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id = order_row.o_id;
END $$
