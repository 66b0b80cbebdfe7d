CREATE OR REPLACE FUNCTION tpcc_new_order(
    w INTEGER, d INTEGER, c INTEGER, items TEXT, suppliers TEXT, quantities TEXT)
RETURNS TABLE (
    order_number INTEGER, last_name TEXT, credit TEXT, discount INTEGER,
    warehouse_tax INTEGER, district_tax INTEGER, total_cents BIGINT)
LANGUAGE plpgsql AS $$
DECLARE
    item_of INTEGER[] := string_to_array(items, ',')::INTEGER[];
    supplier INTEGER[] := string_to_array(suppliers, ',')::INTEGER[];
    quantity INTEGER[] := string_to_array(quantities, ',')::INTEGER[];
    known RECORD;
    taken RECORD;
    amount_cents BIGINT;
    sum_cents BIGINT := 0;
BEGIN
    UPDATE district SET d_next_o_id = d_next_o_id + 1
        WHERE d_w_id = w AND d_id = d RETURNING d_next_o_id - 1, d_tax INTO STRICT order_number, district_tax;
    SELECT c_discount, c_last, c_credit, w_tax INTO STRICT discount, last_name, credit, warehouse_tax
        FROM warehouse, customer WHERE w_id = w AND c_w_id = w AND c_d_id = d AND c_id = c;
    INSERT INTO orders (o_w_id, o_d_id, o_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local)
        VALUES (w, d, order_number, c, CURRENT_TIMESTAMP, cardinality(item_of),
            CASE WHEN w = ALL (supplier) THEN 1 ELSE 0 END);
    INSERT INTO new_order (no_w_id, no_d_id, no_o_id) VALUES (w, d, order_number);

    FOR i IN 1..cardinality(item_of) LOOP
        SELECT i_price, i_name, i_data INTO known FROM item WHERE i_id = item_of[i];
        IF NOT FOUND THEN RAISE EXCEPTION 'Item number is not valid'; END IF;
        UPDATE stock SET
            s_quantity = CASE WHEN s_quantity >= quantity[i] + 10 THEN s_quantity - quantity[i]
                ELSE s_quantity - quantity[i] + 91 END,
            s_ytd = s_ytd + quantity[i], s_order_cnt = s_order_cnt + 1,
            s_remote_cnt = s_remote_cnt + CASE WHEN supplier[i] = w THEN 0 ELSE 1 END
            WHERE s_w_id = supplier[i] AND s_i_id = item_of[i]
            RETURNING CASE d WHEN 1 THEN s_dist_01 WHEN 2 THEN s_dist_02 WHEN 3 THEN s_dist_03
                WHEN 4 THEN s_dist_04 WHEN 5 THEN s_dist_05 WHEN 6 THEN s_dist_06 WHEN 7 THEN s_dist_07
                WHEN 8 THEN s_dist_08 WHEN 9 THEN s_dist_09 WHEN 10 THEN s_dist_10 END AS dist_info,
                s_quantity, s_data
            INTO STRICT taken;
        amount_cents := quantity[i]::BIGINT * known.i_price;
        INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_supply_w_id,
            ol_quantity, ol_amount, ol_dist_info)
            VALUES (w, d, order_number, i, item_of[i], supplier[i], quantity[i], amount_cents, taken.dist_info);
        sum_cents := sum_cents + amount_cents;
    END LOOP;
    total_cents := sum_cents * (10000 - discount) * (10000 + warehouse_tax + district_tax) / 100000000;
    RETURN NEXT;
END $$
