CREATE OR REPLACE PROCEDURE tpcc_stock_level(w INTEGER, d INTEGER, threshold INTEGER)
RETURNS TABLE (low INTEGER)
LANGUAGE lua AS $$
    local district = db.query("SELECT d_next_o_id FROM district WHERE d_w_id = $1 AND d_id = $2", w, d)[1]
    return db.query("SELECT count(DISTINCT s_i_id) AS low FROM order_line CROSS JOIN stock \
        WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id < $3 AND ol_o_id >= $3 - 20 \
        AND s_w_id = $1 AND s_i_id = ol_i_id AND s_quantity < $4", w, d, district.d_next_o_id, threshold)
$$
