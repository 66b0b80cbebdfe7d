CREATE OR REPLACE FUNCTION tpcc_stock_level(w INTEGER, d INTEGER, threshold INTEGER)
RETURNS INTEGER
LANGUAGE plpgsql AS $$
DECLARE
    next_number INTEGER;
    low INTEGER;
BEGIN
    SELECT d_next_o_id INTO STRICT next_number FROM district WHERE d_w_id = w AND d_id = d;
    SELECT count(DISTINCT s_i_id) INTO STRICT low FROM order_line CROSS JOIN stock
        WHERE ol_w_id = w AND ol_d_id = d AND ol_o_id < next_number AND ol_o_id >= next_number - 20
        AND s_w_id = w AND s_i_id = ol_i_id AND s_quantity < threshold;
    RETURN low;
END $$
