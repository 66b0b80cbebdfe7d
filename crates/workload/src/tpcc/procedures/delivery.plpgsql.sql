CREATE OR REPLACE FUNCTION tpcc_delivery(w INTEGER, carrier INTEGER)
RETURNS INTEGER
LANGUAGE plpgsql AS $$
DECLARE
    number INTEGER;
    customer_number INTEGER;
    sum_cents BIGINT;
    delivered INTEGER := 0;
BEGIN
    FOR d IN 1..10 LOOP
        LOOP
            SELECT no_o_id INTO number FROM new_order WHERE no_w_id = w AND no_d_id = d
                ORDER BY no_o_id LIMIT 1;
            EXIT WHEN NOT FOUND;
            -- Another delivery may have taken this order meanwhile. Then the next one is the
            -- oldest.
            DELETE FROM new_order WHERE no_w_id = w AND no_d_id = d AND no_o_id = number;
            EXIT WHEN FOUND;
        END LOOP;
        CONTINUE WHEN number IS NULL;
        UPDATE orders SET o_carrier_id = carrier
            WHERE o_w_id = w AND o_d_id = d AND o_id = number RETURNING o_c_id INTO STRICT customer_number;
        UPDATE order_line SET ol_delivery_d = CURRENT_TIMESTAMP
            WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id = number;
        SELECT sum(ol_amount) INTO STRICT sum_cents FROM order_line
            WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id = number;
        UPDATE customer SET c_balance = c_balance + sum_cents, c_delivery_cnt = c_delivery_cnt + 1
            WHERE c_w_id = w AND c_d_id = d AND c_id = customer_number;
        delivered := delivered + 1;
    END LOOP;
    RETURN delivered;
END $$
